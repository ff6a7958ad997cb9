"""Liveness of machines, counted in stream time."""

from __future__ import annotations

from jigsawrl.contract.commands import RestartTenant, StartTenant, StopTenant
from jigsawrl.contract.events import Heartbeat, NodeStarted, NodeStopped
from jigsawrl.contract.message import Worker
from jigsawrl.core import workers
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Node, Pipeline, State, Tenant

SILENCE_S = 10.0
"""Five missed heartbeats: the node is lost, and its workers with it."""

JOIN_GRACE_S = 10.0
"""After a machine joined: others may be about to, so that nothing is failed for want of devices."""


def started(state: State, event: NodeStarted) -> None:
    """A node's boot is up; whatever an older boot ran is gone."""
    known = state.nodes.get(event.node.id)
    boot = event.node.boot
    own = {device.id for device in event.devices if device.node == event.node.id}
    if len(own) < len(event.devices):  # another's devices, or one twice
        state.num_ignored += 1
        return
    if known is not None and (boot in known.past_boots or (boot == known.boot and known.up)):
        state.num_ignored += 1
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
    )
    state.undivided |= {device.id: True for device in event.devices}
    for pipeline, tenant in _tenants(state, event.node.id):
        if tenant.started_on != boot:
            workers.end_boot(pipeline, tenant)
            tenant.applied_share = None
        tenant.lost = False
        state.touch(pipeline)
    _touch_queued(state)


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
    """A node lives. One that was only silent gets its tenants back as they are; what they told
    meanwhile may be on its way still."""
    node = state.nodes.get(event.node.id)
    if node is None or node.boot != event.node.boot:
        state.num_ignored += 1
        return
    node.seen_s = state.clock.now_s
    if not node.up:
        node.up = True
        for pipeline, tenant in _tenants(state, node.id):
            tenant.lost = False
            tenant.heard_s = state.clock.now_s
            state.touch(pipeline)
        _touch_queued(state)


def check(state: State) -> None:
    """Lose the nodes that have been silent for too long, and await no more machines after a while."""
    if state.joined_s is not None and state.clock.expired(state.joined_s, term_s=JOIN_GRACE_S):
        state.joined_s = None
        _touch_queued(state)
    for node in state.nodes.values():
        if node.up and state.clock.expired(node.seen_s, term_s=SILENCE_S):
            node.up = False
            for pipeline, tenant in _tenants(state, node.id):
                workers.lose(pipeline, tenant)
                state.touch(pipeline)


def _touch_queued(state: State) -> None:
    """New devices may be what a queued pipeline waits for."""
    for pipeline in state.pipelines.values():
        if pipeline.stage == "queued":
            state.touch(pipeline)


def _tenants(state: State, node: str) -> list[tuple[Pipeline, Tenant]]:
    return [
        (pipeline, tenant)
        for pipeline in state.pipelines.values()
        for tenant in pipeline.tenants.values()
        if tenant.node == node
    ]


# --- Decisions -----------------------------------------------------------------------------------


def start_tenants(state: State, pipeline: Pipeline, outbox: Outbox, *, pinned: bool) -> None:
    """Order each placed tenant once per boot of its node; the node restarts it by itself."""
    for tenant in pipeline.tenants.values():
        node = state.nodes.get(tenant.node) if tenant.node is not None else None
        if node is None or not node.up or tenant.started_on == node.boot:
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
