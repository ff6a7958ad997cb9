"""The policy `jigsaw`: it decides, and whatever it decides, nothing is lost and a replay agrees."""

from __future__ import annotations

import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract.events import SubStagesEnded
from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.parts import SubStage
from jigsawrl.core import invariants
from jigsawrl.core.prediction import Outlook, predict
from jigsawrl.core.status import pipeline_status
from jigsawrl.core.work_history import median_error
from tests.unit.core.hostile import check_world
from tests.unit.core.world import Faults, World, asynchronous, spec


def issued(world: World, kind: type[c.Command]) -> list[c.Command]:
    return [command for batch in world.issued for command in batch if isinstance(command, kind)]


def test_before_any_history_shares_are_equal_and_nothing_is_held() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec("a"), spec("b")], policy="jigsaw")
    world.run_until(lambda: all(p.version == 0 for p in world.scheduler.state.pipelines.values()))
    assert world.scheduler.state.outlooks.decisions == []
    tenants = [t for p in world.scheduler.state.pipelines.values() for t in p.tenants.values()]
    on_core = [t.share for t in tenants if t.device == "node/cpu0"]
    assert len(set(on_core)) == 1


def test_with_history_it_decides_sets_shares_and_predicts() -> None:
    pipelines = [spec(name, num_steps=12, evaluation=None) for name in ("a", "b", "c")]
    world = World(seed=1, faults=Faults(), pipelines=pipelines, policy="jigsaw")
    world.run()
    state = world.scheduler.state
    assert [p.stage for p in state.pipelines.values()] == ["finished"] * 3
    assert len(state.outlooks.decisions) > 20
    predicted = sum(one.makespan_s for one in state.outlooks.decisions)
    default = sum(one.default_makespan_s for one in state.outlooks.decisions)
    assert predicted <= 1.01 * default, "a little makespan may be given for earlier ends"
    unequal = [
        command
        for command in issued(world, c.SetShares)
        if isinstance(command, c.SetShares) and len({share for _, share in command.shares}) > 1
    ]
    assert unequal
    for pipeline in state.pipelines.values():
        error = median_error(pipeline.errors)
        assert error is not None
    check_world(world)


@pytest.mark.parametrize("seed", range(3))
def test_tails_are_merged_and_no_token_is_made_twice(seed: int) -> None:
    pipelines = [spec(name, num_steps=15, evaluation=None) for name in ("a", "b", "c")]
    world = World(seed=seed, faults=Faults(), pipelines=pipelines, policy="jigsaw")
    world.run()
    statuses = [
        pipeline_status(world.scheduler.state, p) for p in world.scheduler.state.pipelines.values()
    ]
    assert sum(status.num_migrations for status in statuses) > 0
    assert all(status.num_tokens_again == 0 for status in statuses)
    invariants.check(world.scheduler.state)


def test_work_of_steps_that_can_not_be_under_way_is_not_believed() -> None:
    world = World(seed=1, faults=Faults(), pipelines=[spec(num_steps=12)], policy="jigsaw")
    world.run_until(lambda: world.scheduler.state.pipelines["p"].version == 6)
    pipeline = world.scheduler.state.pipelines["p"]
    before = pipeline.work.tenants["p.trainer0"].costs["forward_backward"].open.copy()
    for version in (0, 4, 8, 1 << 50):
        span = SubStage(
            kind="forward_backward",
            version=version,
            started_s=0.0,
            ended_s=9.0,
            duration_s=9.0,
            num_iterations=1,
            num_tokens=1,
        )
        worker = pipeline.tenants["p.trainer0"].worker
        world.publish(SubStagesEnded(id=f"x{version}", pipeline="p", worker=worker, spans=(span,)))
    assert pipeline.work.tenants["p.trainer0"].costs["forward_backward"].open == before
    world.run()
    invariants.check(world.scheduler.state)


def test_longest_first_is_asked_for_where_a_step_waits_for_its_longest_sequence() -> None:
    pipelines = [spec("a"), asynchronous(1, name="b")]
    world = World(seed=0, faults=Faults(), pipelines=pipelines, policy="jigsaw")
    world.run()
    asked = {
        (command.worker.id.partition(".")[0], command.longest_first)
        for command in issued(world, c.PlaceSequences)
        if isinstance(command, c.PlaceSequences)
    }
    assert asked == {("a", True), ("b", False)}
    check_world(world)


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_waits_count_for_the_step_that_they_delay_and_use_no_device(max_staleness: int) -> None:
    pipelines = [asynchronous(max_staleness, num_steps=12) if max_staleness else spec(num_steps=12)]
    world = World(seed=1, faults=Faults(), pipelines=pipelines, policy="jigsaw")

    def wait(tenant: str, kind: SubStageKind, version: int) -> None:
        span = SubStage(
            kind=kind,
            version=version,
            started_s=0.0,
            ended_s=0.5,
            duration_s=0.5,
            num_iterations=3,
            num_tokens=0,
        )
        worker = pipeline.tenants[tenant].worker
        event_id = f"{kind}{version}"
        world.publish(SubStagesEnded(id=event_id, pipeline="p", worker=worker, spans=(span,)))

    state = world.scheduler.state
    for version in range(3, 7):
        world.run_until(lambda version=version: state.pipelines["p"].version == version)  # type: ignore[misc]
        pipeline = state.pipelines["p"]
        # Where batches overlap, what is scored now was generated by weights of a version before; and
        # which wait for rewards was a step's last is known in the next step.
        wait("p.rollout0", "tool_wait", version - max_staleness)
        wait("p.reward0", "reward_wait", version - 1)
        step = version + (1 if max_staleness and pipeline.open_cut else 0)
        costs = {name: tenant.costs for name, tenant in pipeline.work.tenants.items()}
        assert costs["p.rollout0"]["tool_wait"].open[step].work_s >= 0.5
        assert costs["p.reward0"]["reward_wait"].open[step].work_s >= 0.5
    nodes = predict(pipeline.work, Outlook(pipeline="p", version=6))
    waits = {node.kind: node.device for node in nodes if node.kind in ("tool_wait", "reward_wait")}
    assert waits == {"tool_wait": None, "reward_wait": None}
    world.run()
    invariants.check(state)
