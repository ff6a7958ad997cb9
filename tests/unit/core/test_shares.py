"""How devices are divided: what is wanted, what is commanded, what is believed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Worker
from jigsawrl.core import invariants, shares
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.policies.shuffle import SPLIT_S
from jigsawrl.core.state import State, Tenant
from tests.unit.core.world import Faults, World, spec

CPU0, CPU1 = "node/cpu0", "node/cpu1"
HALVES = {"p.trainer0": 0.5, "p.rollout1": 0.5}


@pytest.fixture
def world() -> Iterator[World]:
    """One kind world whose pipeline ``p`` runs."""
    made = World(seed=0, faults=Faults(), pipelines=[spec()])
    made.run_until(lambda: made.scheduler.state.pipelines["p"].stage == "running")
    yield made
    invariants.check(made.scheduler.state)


def state_of(world: World) -> State:
    return world.scheduler.state


def tenant_of(world: World, name: str) -> Tenant:
    tenant = shares.find(state_of(world), name)
    assert tenant is not None
    return tenant


def commanded(world: World, wanted: shares.Wanted) -> list[c.SetShares]:
    outbox = Outbox(sequence=9, cause="cause", leader_epoch=1)
    shares.command(state_of(world), wanted, outbox)
    assert all(isinstance(command, c.SetShares) for command in outbox.commands)
    return outbox.commands  # type: ignore[return-value]


def test_tenants_of_one_pipeline_have_equal_parts_of_their_device_from_the_start(
    world: World,
) -> None:
    assert shares.equal(state_of(world)) == {
        CPU0: HALVES,
        CPU1: {"p.evaluation0": 0.5, "p.rollout0": 0.5},
    }
    orders = [o for batch in world.issued for o in batch if isinstance(o, c.StartTenant)]
    assert {o.tenant: o.share for o in orders if o.device is not None} == {
        "p.trainer0": 0.5,
        "p.rollout1": 0.5,
        "p.evaluation0": 0.5,
        "p.rollout0": 0.5,
    }
    assert not any(isinstance(o, c.SetShares) for batch in world.issued for o in batch)


def test_a_pipeline_that_joins_is_made_room_for_first_and_leaves_its_room_at_its_end() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec("a")], policy="unmanaged")
    pipelines = state_of(world).pipelines
    world.run_until(lambda: pipelines["a"].stage == "running")
    submitted = e.PipelineSubmitted(id="s", pipeline="b", spec=spec("b"), config=b"")
    world.publish(submitted)
    world.run_until(lambda: pipelines["b"].stage == "running")
    batch = next(
        batch
        for batch in world.issued
        if any(isinstance(o, c.StartTenant) and o.pipeline == "b" for o in batch)
    )
    orders = [o for o in batch if isinstance(o, c.SetShares)]
    assert batch[: len(orders)] == orders
    assert {o.device for o in orders} == {CPU0, CPU1}
    assert all(math.fsum(share for _, share in o.shares) == 1 for o in orders)
    world.run()
    ends = [o for batch in world.issued for o in batch if isinstance(o, c.SetShares)][2:]
    assert {o.device for o in ends} == {CPU0, CPU1}
    assert all(share == 0.5 for o in ends for _, share in o.shares)
    invariants.check(state_of(world))


def test_only_devices_that_changed_are_commanded(world: World) -> None:
    thirds = {"p.trainer0": 0.75, "p.rollout1": 0.25}
    rest = {"p.evaluation0": 0.5, "p.rollout0": 0.5}
    (order,) = commanded(world, {CPU0: thirds, CPU1: rest})
    assert (order.device, dict(order.shares)) == (CPU0, thirds)
    node = state_of(world).nodes["node"]
    assert order.worker == Worker(id="node", boot=node.boot)
    assert commanded(world, {CPU0: thirds, CPU1: rest}) == []
    assert tenant_of(world, "p.trainer0").share == 0.75
    assert tenant_of(world, "p.trainer0").applied_share == 0.5


def test_tenants_that_do_not_run_yet_are_told_by_their_start_alone(world: World) -> None:
    node = state_of(world).nodes["node"]
    for name in HALVES:
        tenant_of(world, name).started_on = "an older boot"
    assert commanded(world, {CPU0: {"p.trainer0": 0.75, "p.rollout1": 0.25}}) == []
    tenant_of(world, "p.rollout1").started_on = node.boot
    (order,) = commanded(world, {CPU0: {"p.trainer0": 0.25, "p.rollout1": 0.75}})
    assert dict(order.shares) == {"p.trainer0": 0.25, "p.rollout1": 0.75}


def applied(world: World, *, applied: float = 0.3, **changes: Any) -> e.SharesApplied:
    node = state_of(world).nodes["node"]
    entry = parts.AppliedShare(tenant="p.trainer0", asked=0.5, applied=applied)
    event = e.SharesApplied(
        id="s",
        node=Worker(id="node", boot=node.boot),
        device=CPU0,
        shares=(entry,),
        mechanism="nice",
        fell_back="no control group",
    )
    return msgspec.structs.replace(event, **changes)


def test_what_the_node_applied_is_remembered(world: World) -> None:
    world.publish(applied(world))
    assert tenant_of(world, "p.trainer0").applied_share == 0.3
    assert tenant_of(world, "p.rollout1").applied_share == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_a_share_that_can_not_be_is_ignored_and_counted(world: World, value: float) -> None:
    before = state_of(world).num_ignored
    world.publish(applied(world, applied=value))
    assert tenant_of(world, "p.trainer0").applied_share == 0.5
    assert state_of(world).num_ignored == before + 1


@pytest.mark.parametrize(
    "changes",
    [
        {"node": Worker(id="node", boot="older")},
        {"node": Worker(id="other", boot="b")},
        {"device": CPU1},
        {"shares": (parts.AppliedShare(tenant="p.nobody", asked=0.5, applied=0.3),)},
        {"shares": (parts.AppliedShare(tenant="q.trainer0", asked=0.5, applied=0.3),)},
    ],
)
def test_only_the_living_boot_is_believed_about_tenants_of_its_devices(
    world: World, changes: dict[str, Any]
) -> None:
    before = state_of(world).num_ignored
    world.publish(applied(world, **changes))
    assert tenant_of(world, "p.trainer0").applied_share == 0.5
    assert state_of(world).num_ignored == before + 1


def test_sub_stages_are_weighed_with_the_share_that_was_applied(world: World) -> None:
    pipeline = state_of(world).pipelines["p"]
    pipeline.substages = {}
    spans = [
        parts.SubStage(
            kind="optimizer",
            version=0,
            started_s=0.0,
            ended_s=0.25,
            duration_s=duration_s,
            num_iterations=1,
            num_tokens=0,
        )
        for duration_s in (3.0, 1.0, math.nan, math.inf, -1.0)
    ]
    trainer = tenant_of(world, "p.trainer0")
    for span, share in zip(spans, (0.3, 0.7, 0.7, 0.7, 0.7), strict=True):
        world.publish(applied(world, applied=share))
        world.publish(e.SubStagesEnded(id="e", pipeline="p", worker=trainer.worker, spans=(span,)))
    seconds, weighted = pipeline.substages["optimizer"]
    assert seconds == 4
    assert weighted == pytest.approx(3 * 0.3 + 0.7)


def test_the_next_boot_of_a_node_has_applied_nothing_yet_and_is_told_with_the_starts(
    world: World,
) -> None:
    commanded(world, {CPU0: {"p.trainer0": 0.75, "p.rollout1": 0.25}})
    device = state_of(world).nodes["node"].devices
    boot = Worker(id="node", boot="next")
    world.publish(e.NodeStarted(id="n", node=boot, devices=tuple(device)))
    assert tenant_of(world, "p.trainer0").applied_share is None
    world.publish(e.Tick(id="t"))
    starts = [o for o in world.issued[-1] if isinstance(o, c.StartTenant)]
    assert {o.tenant: o.share for o in starts}["p.trainer0"] == 0.75
    (order,) = (o for o in world.issued[-1] if isinstance(o, c.SetShares))
    assert dict(order.shares) == HALVES  # the policy's view


def test_shuffle_holds_each_tenant_in_turn_and_nobody_for_long() -> None:
    pipelines = [spec(name, evaluation=None) for name in ("a", "b")]
    world = World(seed=0, faults=Faults(), pipelines=pipelines, policy="shuffle")
    held_since_s: dict[str, float] = {}
    longest_s: dict[str, float] = {}

    def watch() -> bool:
        state = world.scheduler.state
        for pipeline in state.pipelines.values():
            for tenant in pipeline.tenants.values():
                if pipeline.active and tenant.share == 0:
                    since_s = held_since_s.setdefault(tenant.id, world.now_s)
                    longest_s[tenant.id] = max(longest_s.get(tenant.id, 0), world.now_s - since_s)
                else:
                    held_since_s.pop(tenant.id, None)
        return not any(p.live for p in state.pipelines.values())

    world.run_until(watch)
    computing = {f"{name}.{role}" for name in "ab" for role in ("trainer0", "rollout0", "rollout1")}
    assert set(longest_s) == computing
    assert max(longest_s.values()) <= SPLIT_S + 0.2, "a tick and a message late at most"
    invariants.check(world.scheduler.state)
