"""Liveness of machines, counted in stream time."""

from __future__ import annotations

from jigsawrl.contract.commands import ReleaseNode, RestartTenant, StartTenant, StopTenant
from jigsawrl.contract.events import (
    Heartbeat,
    NodeLeaving,
    NodeStarted,
    NodeStopped,
    TenantStopped,
)
from jigsawrl.contract.message import Worker
from jigsawrl.core import relocation, workers
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Node, Pipeline, State, Tenant

SILENCE_S = 10.0
"""Five missed heartbeats: the node is lost, and its workers with it."""

MAX_DEVICES = 4096
"""Of one machine. More are no machine's, and each costs memory and time at every placement."""

FORGET_S = 86_400.0
"""A day after it was heard last, a node without tenants is no longer told of: people have seen it, and
under Slurm each job brings names of its own."""

JOIN_GRACE_S = 10.0
"""After a machine joined: others may be about to, so that nothing is failed for want of devices."""


def started(state: State, event: NodeStarted) -> None:
    """A node's boot is up; whatever an older boot ran is gone. One from elsewhere that bears the name
    of a node which is up is sent away, or the two would take it from one another for ever."""
    known = state.nodes.get(event.node.id)
    boot = event.node.boot
    own = {device.id for device in event.devices if device.node == event.node.id}
    if len(own) < len(event.devices) or len(own) > MAX_DEVICES:  # another's devices, or one twice
        state.num_ignored += 1
        return
    if known is not None and (boot in known.past_boots or (boot == known.boot and known.up)):
        state.num_ignored += 1
        return
    if known is not None and known.up and known.home not in ("", event.home):
        state.num_ignored += 1
        state.unwanted[boot] = known.id
        return
    if known is None:
        state.joined_s = state.clock.now_s
    past = [] if known is None else [*known.past_boots[-15:], known.boot]
    state.nodes[event.node.id] = Node(
        id=event.node.id,
        boot=boot,
        devices=sorted(event.devices),
        seen_s=state.clock.now_s,
        past_boots=[b for b in past if b != boot],
        runs_id=event.runs_id,
        home=event.home,
    )
    state.undivided |= {device.id: True for device in event.devices}
    for pipeline, tenant in _tenants(state, event.node.id):
        if tenant.started_on != boot:
            workers.end_boot(pipeline, tenant)
            tenant.applied_share = None
        tenant.lost = tenant.leaving = tenant.stopping = False
        state.touch(pipeline)
    _touch_waiting(state)


def leaving(state: State, event: NodeLeaving) -> None:
    """A node stops soon: nothing new is begun there, and what is there is handed over. A boot that was
    never let in, or that another took the place of, has nothing to hand over and need not wait."""
    node = state.nodes.get(event.node.id)
    if node is None or node.boot != event.node.boot:
        state.num_ignored += 1
        state.unwanted[event.node.boot] = event.node.id
        return
    if not node.open:
        state.num_ignored += 1
        return
    node.leaving = True
    state.node_orders[node.id] = True
    for pipeline, tenant in _tenants(state, node.id):
        tenant.leaving = True
        state.touch(pipeline)


def tenant_stopped(state: State, event: TenantStopped) -> None:
    """A tenant of a machine that leaves has ended there: it may live elsewhere now."""
    for pipeline, tenant in _tenants(state, event.node.id):
        if tenant.id == event.tenant and tenant.stopping and tenant.started_on == event.node.boot:
            tenant.started_on = None
            state.touch(pipeline)


def stopped(state: State, event: NodeStopped) -> None:
    """A node leaves and stops its tenants."""
    node = state.nodes.get(event.node.id)
    if node is None or node.boot != event.node.boot:
        state.num_ignored += 1
        return
    node.up = False
    for pipeline, tenant in _tenants(state, node.id):
        workers.end_boot(pipeline, tenant)
        tenant.lost = True
        state.touch(pipeline)


def heard(state: State, event: Heartbeat) -> None:
    """A node lives. One that was only silent gets those tenants back that have found no other place, as
    they are; what they told meanwhile may be on its way still. A boot that another one has taken the
    place of has been started under a name that is in use."""
    node = state.nodes.get(event.node.id)
    if node is None or node.boot != event.node.boot:
        state.num_ignored += 1
        if node is not None and node.up and event.node.boot in node.past_boots:
            state.unwanted[event.node.boot] = node.id
        return
    node.seen_s = state.clock.now_s
    if not node.up:
        node.up = True
        for pipeline, tenant in _tenants(state, node.id):
            tenant.lost = False
            tenant.heard_s = state.clock.now_s
            state.touch(pipeline)
        if node.strays:
            state.node_orders[node.id] = True
        _touch_waiting(state)


def check(state: State) -> None:
    """Lose the nodes that have been silent for too long, forget those that stay away, and await no more
    machines after a while."""
    if state.joined_s is not None and state.clock.expired(state.joined_s, term_s=JOIN_GRACE_S):
        state.joined_s = None
        _touch_waiting(state)
    for node in state.nodes.values():
        if node.up and state.clock.expired(node.seen_s, term_s=SILENCE_S):
            node.up = False
            for pipeline, tenant in _tenants(state, node.id):
                workers.lose(pipeline, tenant)
                state.touch(pipeline)
    away = [node for node in state.nodes.values() if not node.up]
    for node in away:
        if state.clock.expired(node.seen_s, term_s=FORGET_S) and not _is_needed(state, node.id):
            del state.nodes[node.id]
            state.introductions.pop(node.id, None)
            state.node_orders.pop(node.id, None)


def _is_needed(state: State, node: str) -> bool:
    """A pipeline that lives still counts on it."""
    return any(pipeline.live for pipeline, _ in _tenants(state, node))


def _touch_waiting(state: State) -> None:
    """New devices may be what a queued pipeline waits for, or one that lost a machine."""
    for pipeline in state.pipelines.values():
        if pipeline.stage == "queued" or (pipeline.active and relocation.is_needed(pipeline)):
            state.touch(pipeline)


def _tenants(state: State, node: str) -> list[tuple[Pipeline, Tenant]]:
    return [
        (pipeline, tenant)
        for pipeline in state.pipelines.values()
        for tenant in pipeline.tenants.values()
        if tenant.node == node
    ]


# --- Decisions -----------------------------------------------------------------------------------


def stop_strays(state: State, outbox: Outbox) -> None:
    """A node that is heard again ends what has moved elsewhere meanwhile. Comes before the starts of
    the same pass: it may get such a tenant back."""
    for name in state.node_orders:
        node = state.nodes[name]
        if node.up:
            for tenant in node.strays:
                to = outbox.to(Worker(id=node.id, boot=node.boot))
                outbox.add(StopTenant(**to, tenant=tenant))
            node.strays = []


def release(state: State, outbox: Outbox) -> None:
    """Tell nodes that leave, once they hold nothing that could be handed over; and boots that should
    not be there."""
    waiting: dict[str, bool] = {}
    for name in state.node_orders:
        node = state.nodes[name]
        if not node.up or not node.leaving or node.released:
            continue
        if any(p.active and _holds(p, t) for p, t in _tenants(state, name)):
            waiting[name] = True
            continue
        to = outbox.to(Worker(id=node.id, boot=node.boot))
        outbox.add(ReleaseNode(**to, reason="all that could be handed over was"))
        node.released = True
    state.node_orders = waiting
    for boot, name in state.unwanted.items():
        reason = (
            f"another node is called {name}: give each a name of its own"
            if name in state.nodes
            else f"the scheduler has not let {name} in: there is nothing to hand over"
        )
        outbox.add(ReleaseNode(**outbox.to(Worker(id=name, boot=boot)), reason=reason))
    state.unwanted = {}


def _holds(pipeline: Pipeline, tenant: Tenant) -> bool:
    """Something that is being handed over: live sequences, or the state of a trainer."""
    ends = tenant.stopping and tenant.started_on is not None
    return ends or bool(pipeline.num_generating.get(tenant.id))


def start_tenants(state: State, pipeline: Pipeline, outbox: Outbox, *, pinned: bool) -> None:
    """Order each placed tenant once per boot of its node; the node restarts it by itself."""
    for tenant in pipeline.tenants.values():
        node = state.nodes.get(tenant.node) if tenant.node is not None else None
        if node is None or not node.up or tenant.started_on == node.boot or tenant.stopping:
            continue
        outbox.add(
            StartTenant(
                **outbox.to(Worker(id=node.id, boot=node.boot)),
                tenant=tenant.id,
                role=tenant.role,
                pipeline=pipeline.name,
                device=tenant.device,
                share=1.0 if tenant.share is None else tenant.share,
                pinned=pinned,
            )
        )
        tenant.started_on = node.boot
        tenant.heard_s = state.clock.now_s


def restart_tenants(state: State, pipeline: Pipeline, outbox: Outbox) -> None:
    """End what is left of a gang that lost a rank, and what is frozen; where its node is silent, once
    it is heard again."""
    waiting: dict[str, str | None] = {}
    for name, boot in pipeline.restarts.items():
        tenant = pipeline.tenants[name]
        node = state.nodes.get(tenant.node) if tenant.node is not None else None
        if node is None or tenant.started_on != node.boot:
            continue  # its node's boot ended, and the process with it
        if node.up:
            to = outbox.to(Worker(id=node.id, boot=node.boot))
            outbox.add(RestartTenant(**to, tenant=name, boot=boot))
            tenant.heard_s = state.clock.now_s
        else:
            waiting[name] = boot
    pipeline.restarts = waiting


def stop_tenants(state: State, pipeline: Pipeline, outbox: Outbox) -> None:
    """Stop what an ended pipeline leaves."""
    for name in pipeline.stops:
        tenant = pipeline.tenants[name]
        node = state.nodes.get(tenant.node) if tenant.node is not None else None
        if node is not None and tenant.started_on == node.boot:
            outbox.add(
                StopTenant(**outbox.to(Worker(id=node.id, boot=node.boot)), tenant=tenant.id)
            )
    pipeline.stops = []
