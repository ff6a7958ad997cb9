"""Which of several pipelines may begin its work, and when."""

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
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
