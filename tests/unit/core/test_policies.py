"""Which pipelines run at once, and where their tenants live."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.core import invariants
from jigsawrl.core.pipelines import has_begun
from jigsawrl.core.policies import POLICIES
from jigsawrl.core.status import pipeline_status
from tests.unit.core.hostile import check_world, drawing, faults
from tests.unit.core.queries import issued, pipeline_of
from tests.unit.core.world import Faults, World, asynchronous, spec


def devices(world: World) -> dict[str, Any]:
    orders = issued(world, c.StartTenant)
    return {order.tenant: order.device for order in orders if order.device is not None}


def stages(world: World) -> list[str]:
    return [pipeline.stage for pipeline in world.scheduler.state.pipelines.values()]


@pytest.mark.parametrize("policy", POLICIES)
def test_under_every_policy_all_pipelines_end_and_nothing_is_lost(policy: str) -> None:
    pipelines = [spec("a"), asynchronous(1, name="b"), spec("c")]
    world = World(seed=3, faults=Faults(), pipelines=pipelines, policy=policy)
    world.run()
    assert stages(world) == ["finished"] * 3
    invariants.check(world.scheduler.state)


@pytest.mark.parametrize("policy", ["rlix", "jigsaw"])
@drawing(10)
@given(
    seed=st.integers(0, 1 << 32),
    num_pipelines=st.integers(1, 3),
    max_staleness=st.integers(0, 2),
    num_ranks=st.integers(1, 2),
    harm=faults(kill_per_s=[0.03], lose=[0.1], node_restart_per_s=[0.01]),
)
def test_in_a_hostile_world_all_pipelines_end_and_nothing_is_lost(
    policy: str, seed: int, num_pipelines: int, max_staleness: int, num_ranks: int, harm: Faults
) -> None:
    first = asynchronous(max_staleness, name="p0", num_steps=5, num_trainer_ranks=num_ranks)
    others = [spec(f"p{i}", num_steps=5) for i in range(1, num_pipelines)]
    world = World(seed=seed, faults=harm, pipelines=[first, *others], policy=policy)
    world.run()
    for pipeline in world.scheduler.state.pipelines.values():
        status = pipeline_status(world.scheduler.state, pipeline)
        assert status.state == "finished", status.failure
        assert status.groups.trained == 15
    check_world(world)


def test_unmanaged_starts_all_at_once_and_spreads_trainers() -> None:
    pipelines = [spec("a", evaluation=None), spec("b", evaluation=None)]
    world = World(seed=0, faults=Faults(), pipelines=pipelines, policy="unmanaged")
    world.run_until(lambda: stages(world) == ["running", "running"])
    assert devices(world) == {
        "a.trainer0": "node/cpu0",
        "a.rollout0": "node/cpu1",
        "a.rollout1": "node/cpu0",
        "b.trainer0": "node/cpu1",
        "b.rollout0": "node/cpu0",
        "b.rollout1": "node/cpu1",
    }


@pytest.mark.parametrize(("policy", "pinned"), [("unmanaged", True), ("unmanaged-unpinned", False)])
def test_tenants_are_pinned_unless_the_policy_leaves_cores_to_the_system(
    policy: str, pinned: bool
) -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec()], policy=policy)
    world.run_until(lambda: stages(world) == ["running"])
    assert {order.pinned for order in issued(world, c.StartTenant)} == {pinned}


@pytest.mark.parametrize(("policy", "pipeline"), [("serial", asynchronous(1)), ("areal", spec())])
def test_generation_lives_apart_from_training_where_they_overlap(
    policy: str, pipeline: Any
) -> None:
    world = World(seed=0, faults=Faults(), pipelines=[pipeline], policy=policy)
    world.run_until(lambda: stages(world) == ["running"])
    where = devices(world)
    assert where["p.trainer0"] == "node/cpu0"
    assert where["p.rollout0"] == where["p.rollout1"] == "node/cpu1"


def test_the_policy_of_the_leader_decides_from_its_election_on() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec("a"), spec("b")])
    world.run_until(lambda: has_begun(pipeline_of(world, "a")))
    assert not has_begun(pipeline_of(world, "b"))
    world.publish(e.LeaderElected(id="l2", leader="t", code_version="1", policy="unmanaged"))
    world.run_until(lambda: has_begun(pipeline_of(world, "b")))
    assert pipeline_of(world, "a").live
    world.publish(e.LeaderElected(id="l3", leader="u", code_version="9", policy="unheard-of"))
    world.run()
    assert stages(world) == ["finished", "finished"]
    assert world.scheduler.state.policy == "unmanaged"
    invariants.check(world.scheduler.state)
