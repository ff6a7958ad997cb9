"""Which of several pipelines may begin its work, and when."""

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.spec import MemorySpec
from jigsawrl.core import invariants
from jigsawrl.core.status import pipeline_status
from tests.unit.core.queries import issued, pipeline_of
from tests.unit.core.world import KIND, World, spec


def test_serial_lets_the_next_pipeline_begin_when_the_one_before_has_ended_its_work() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: bool(pipeline_of(world, "a").groups))
    world.run_until(lambda: pipeline_of(world, "b").version == 0)
    status = pipeline_status(world.scheduler.state, pipeline_of(world, "b"))
    assert "its turn: pipeline a comes first" in status.waiting_for
    world.run_until(lambda: bool(pipeline_of(world, "b").groups))
    assert pipeline_of(world, "a").version == spec("a").num_steps
    world.run()
    makes = [make.orders[0].group.partition("/")[0] for make in issued(world, c.MakeGroups)]
    assert makes == ["a"] * 3 + ["b"] * 3


def test_companions_begin_together_once_all_are_ready() -> None:
    world = World(
        seed=0,
        faults=KIND,
        pipelines=[spec("a"), spec("b")],
        policy="unmanaged",
        companions={"a": ("b",), "b": ("a",)},
    )
    world.run_until(lambda: bool(issued(world, c.MakeGroups)))
    for name in ("a", "b"):
        pipeline = pipeline_of(world, name)
        assert pipeline.groups
        assert all(tenant.usable for tenant in pipeline.tenants.values())
        assert all(tenant.version == 0 for tenant in pipeline.usable("rollout"))


def test_one_whose_companion_is_not_ready_says_so_and_begins_when_that_one_fails() -> None:
    world = World(
        seed=0,
        faults=KIND,
        pipelines=[spec("a")],
        policy="unmanaged",
        companions={"a": ("b",)},
    )
    world.run_until(lambda: pipeline_of(world, "a").version == 0)
    status = pipeline_status(world.scheduler.state, pipeline_of(world, "a"))
    assert "pipeline b to be submitted" in status.waiting_for
    world.publish(e.PipelineSubmitted(id="b", pipeline="b", spec=spec("b"), config=b""))
    world.publish(e.PipelineCancelled(id="x", pipeline="b", reason="test"))
    world.run_until(lambda: bool(pipeline_of(world, "a").groups))


def test_serial_goes_on_when_the_pipeline_whose_turn_it_is_fails() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: bool(pipeline_of(world, "a").groups))
    refused = e.WorkerRefused(
        id="r", pipeline="a", worker=world.processes["a.reward0"].worker, reason="bad"
    )
    world.publish(refused)
    world.run_until(lambda: bool(pipeline_of(world, "b").groups))
    assert pipeline_of(world, "a").failure == "a.reward0: bad"
    assert {s.tenant for s in issued(world, c.StopTenant)} == set(pipeline_of(world, "a").tenants)
    invariants.check(world.scheduler.state)


def test_a_companion_that_finds_no_room_is_not_waited_for() -> None:
    need = MemorySpec(trainer=600, rollout=200)
    pipelines = [
        spec(name, evaluation=None, memory=need, num_trainer_ranks=1, num_rollout_workers=1)
        for name in ("a", "b", "c")
    ]
    world = World(
        seed=0,
        faults=KIND,
        pipelines=pipelines,
        policy="unmanaged",
        companions={"a": ("b", "c"), "b": ("a", "c"), "c": ("a", "b")},
        memory_bytes=(1000, 1000),
    )
    world.run()
    assert [p.stage for p in world.scheduler.state.pipelines.values()] == ["finished"] * 3
    invariants.check(world.scheduler.state)


def test_a_companion_that_is_never_submitted_is_not_waited_for_for_ever() -> None:
    world = World(
        seed=0,
        faults=KIND,
        pipelines=[spec("a", evaluation=None)],
        policy="unmanaged",
        companions={"a": ("b",)},
    )
    world.run()
    assert pipeline_of(world, "a").stage == "finished"


def test_under_serial_nothing_is_evaluated_before_its_pipelines_turn() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")], policy="serial")
    world.run()
    order = [
        command.worker.id.partition(".")[0]
        for batch in world.issued
        for command in batch
        if isinstance(command, c.MakeGroups | c.Evaluate)
    ]
    assert set(order) == {"a", "b"}
    assert order == sorted(order)
