"""Tenants whose machine is gone, or about to go, live on elsewhere.

A tenant keeps its id and gets a new process on a device of the same kind that has room; of its old
one nothing is believed any more, and it is stopped where its machine can still be told. So nothing
depends on whether a silent machine is dead or only cut off. A rollout worker of a machine that leaves
moves once what it generated is handed over; a trainer once it has ended there, so that it goes on with
what it committed at its end: all its ranks together, to a machine where it finds its checkpoints. Who
finds no room waits for some, or for its machine to come back.

Source: ours; the paper does not treat the loss of machines.
"""

from __future__ import annotations

from jigsawrl.contract.commands import StopTenant
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device
from jigsawrl.core import shares, workers
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.policies.placement import Occupancy, Place, devices_for, place_again
from jigsawrl.core.state import Node, Pipeline, State, Tenant


def is_needed(pipeline: Pipeline) -> bool:
    """Some tenant has lost its machine, or is about to."""
    return any(
        tenant.node is not None and _unsettled(tenant) for tenant in pipeline.tenants.values()
    )


def relocate(state: State, pipeline: Pipeline, outbox: Outbox) -> bool:
    """Give a new place to whoever can have one now; whether somebody got one."""
    if not pipeline.active or not is_needed(pipeline):
        return False
    has_moved = False
    occupancy = Occupancy(p for p in state.pipelines.values() if p.live)
    for tenants in _together(state, pipeline):
        node = _home(state, tenants[0])
        devices = [
            device
            for device in devices_for(pipeline, state)
            if _suits(state, device, tenants, node)
        ]
        places = place_again(pipeline, tenants, devices, occupancy) or ()
        if places and _must_end_first(tenants, node, outbox):
            continue
        for place in places:
            _move(state, pipeline, place, node, outbox)
            has_moved = True
    return has_moved


def _must_end_first(tenants: list[Tenant], node: Node, outbox: Outbox) -> bool:
    """Whether ranks of a trainer still run on a machine that leaves; they are told to end."""
    if tenants[0].role != "trainer" or not node.up:
        return False
    running = [tenant for tenant in tenants if tenant.started_on == node.boot]
    for tenant in running:
        if not tenant.stopping:
            to = outbox.to(Worker(id=node.id, boot=node.boot))
            outbox.add(StopTenant(**to, tenant=tenant.id))
            tenant.stopping = True
    return bool(running)


def _together(state: State, pipeline: Pipeline) -> list[list[Tenant]]:
    """Tenants that must move, those that do so together in one list."""
    homeless = [t for t in pipeline.tenants.values() if _is_homeless(state, pipeline, t)]
    gang = [tenant for tenant in homeless if tenant.role == "trainer"]
    others = [[tenant] for tenant in homeless if tenant.role != "trainer"]
    return [gang, *others] if gang else others


def _is_homeless(state: State, pipeline: Pipeline, tenant: Tenant) -> bool:
    node = state.nodes.get(tenant.node) if tenant.node is not None else None
    if node is None or node.open:
        return False
    return not node.up or not pipeline.num_generating.get(tenant.id)


def _unsettled(tenant: Tenant) -> bool:
    return tenant.lost or tenant.leaving


def _home(state: State, tenant: Tenant) -> Node:
    assert tenant.node is not None
    return state.nodes[tenant.node]


def _suits(state: State, device: Device, tenants: list[Tenant], node: Node) -> bool:
    """Of the kind that they had, and for a trainer where its checkpoints are."""
    had = {tenant.device for tenant in tenants}
    kinds = {known.kind for known in node.devices if known.id in had}
    if kinds and device.kind not in kinds:
        return False
    if tenants[0].role != "trainer":
        return True
    return bool(node.runs_id) and state.nodes[device.node].runs_id == node.runs_id


def _move(state: State, pipeline: Pipeline, place: Place, node: Node, outbox: Outbox) -> None:
    tenant = pipeline.tenants[place.tenant]
    if tenant.started_on == node.boot:
        if node.up:
            to = outbox.to(Worker(id=node.id, boot=node.boot))
            outbox.add(StopTenant(**to, tenant=tenant.id))
        else:
            node.strays.append(tenant.id)
    workers.end_boot(pipeline, tenant)
    pipeline.restarts.pop(tenant.id, None)
    shares.leave(state, tenant)
    tenant.node, tenant.device = place.node, place.device
    tenant.started_on = tenant.share = tenant.applied_share = None
    tenant.lost = tenant.leaving = tenant.stopping = False
    shares.settle(state, tenant)
    history = pipeline.work.tenants.get(tenant.id)
    if history is not None:
        history.device = place.device
