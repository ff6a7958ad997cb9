"""Which of several pipelines may begin its work, and when."""

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.spec import MemorySpec
from jigsawrl.core import invariants
from jigsawrl.core.status import pipeline_status
from tests.unit.core.queries import issued, pipeline_of
from tests.unit.core.world import KIND, World, spec


def placed_by(world: World) -> list[str]:
    """Pipelines of the placements so far, in order."""
    return [
        command.placements[0].sequence.partition("/")[0]
        for command in issued(world, c.PlaceSequences)
    ]


def test_serial_lets_the_next_pipeline_begin_when_the_one_before_has_ended_its_work() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: bool(placed_by(world)))
    world.run_until(lambda: pipeline_of(world, "b").version == 0)
    world.run_until(lambda: all(g.prompt for g in pipeline_of(world, "b").groups.values()))
    status = pipeline_status(world.scheduler.state, pipeline_of(world, "b"))
    assert status.waiting_for == ("its turn: pipeline a comes first",)
    world.run_until(lambda: "b" in placed_by(world))
    assert pipeline_of(world, "a").version == spec("a").num_steps
    world.run()
    placed = placed_by(world)
    assert placed == sorted(placed)


def test_serial_has_the_prompts_of_the_next_pipeline_made_before_its_turn() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: pipeline_of(world, "a").version == 2)
    groups = pipeline_of(world, "b").groups.values()
    assert len(groups) == spec("b").groups_per_batch
    assert all(group.prompt is not None for group in groups)
    assert placed_by(world) == ["a"] * len(placed_by(world))


def test_companions_begin_together_once_all_are_ready() -> None:
    world = World(
        seed=0,
        faults=KIND,
        pipelines=[spec("a"), spec("b")],
        policy="unmanaged",
        companions={"a": ("b",), "b": ("a",)},
    )
    world.run_until(lambda: bool(placed_by(world)))
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
    world.run_until(lambda: "a" in placed_by(world))


def test_serial_goes_on_when_the_pipeline_whose_turn_it_is_fails() -> None:
    world = World(seed=0, faults=KIND, pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: bool(placed_by(world)))
    refused = e.WorkerRefused(
        id="r", pipeline="a", worker=world.processes["a.reward0"].worker, reason="bad"
    )
    world.publish(refused)
    world.run_until(lambda: "b" in placed_by(world))
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
        if isinstance(command, c.PlaceSequences | c.Evaluate)
    ]
    assert set(order) == {"a", "b"}
    assert order == sorted(order)
