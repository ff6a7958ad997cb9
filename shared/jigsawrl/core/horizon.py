"""Which devices the policy `jigsaw` decides on next: those on which something changed, with neighbours.

What a tenant does has changed, or a hold has lasted: then its device is due. A decision takes the due
devices that waited longest and fills up with others of the pipelines that meet there, up to
`MAX_DEVICES`; the rest stays due for the next decision. So a decision costs what its devices do, not
what the cluster does. On a cluster of no more devices than that, each decision is on whole placement
groups. What the pipelines do on other devices counts as waits: see `prediction.Outlook.devices`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from jigsawrl.core import phases, shares
from jigsawrl.core.state import Pipeline, State, Tenant

MAX_DEVICES = 4
"""Of one decision. What it costs grows with them, as the policy gives it so many nodes for each."""


def notice(state: State, *, max_hold_s: float) -> None:
    """Mark the devices on which something changed since the last call."""
    due = state.outlooks.due
    for pipeline in state.pipelines.values():
        if pipeline.active:
            for tenant in _turned(state, pipeline):
                if tenant.device is not None:
                    due[tenant.device] = True
    now_s = state.clock.now_s
    for id, since_s in state.outlooks.held_since_s.items():
        if now_s - since_s >= max_hold_s:
            held = shares.find(state, tenant_of(id))
            if held is not None and held.device is not None:
                due[held.device] = True


def _turned(state: State, pipeline: Pipeline) -> list[Tenant]:
    """Tenants that do something else than when they were looked at last."""
    found = [pipeline.tenants[name] for name in pipeline.turned if name in pipeline.tenants]
    pipeline.turned = {}
    evaluation = pipeline.evaluation
    evaluates = evaluation is not None and evaluation.sent_to is not None
    cut = pipeline.open_cut
    now = (None if cut is None else cut.version, evaluates)
    before = state.outlooks.seen.get(pipeline.name, (None, False))
    if now != before:
        state.outlooks.seen[pipeline.name] = now
        changed = [
            role
            for role, a, b in zip(("trainer", "evaluation"), now, before, strict=True)
            if a != b
        ]
        found += [tenant for tenant in pipeline.tenants.values() if tenant.role in changed]
    return found


def take(state: State, *, devices: Container[str]) -> list[str]:
    """The devices of the next decision, out of those that nodes offer (`devices`); they are no longer
    due. Nothing where none is."""
    due = state.outlooks.due
    chosen = {device: True for device in list(due)[:MAX_DEVICES] if device in devices}
    for device in list(due)[:MAX_DEVICES]:
        del due[device]
    if not chosen:
        return []
    for device in _neighbours(state, list(chosen)):
        if len(chosen) >= MAX_DEVICES:
            break
        if device in devices:
            chosen[device] = True
            due.pop(device, None)
    return list(chosen)


def _neighbours(state: State, chosen: list[str]) -> Iterator[str]:
    """Devices of the pipelines that live on those chosen, of the pipelines there, and so on: first
    those on which the pipeline works, since a tail may move there."""
    pipelines: dict[str, bool] = {}
    reached = dict.fromkeys(chosen, True)
    for device in chosen:  # grows while it is walked
        for name in state.residents.get(device, ()):
            owner = name.partition(".")[0]
            if owner in pipelines:
                continue
            pipelines[owner] = True
            pipeline = state.pipelines[owner]
            idle = []
            for tenant in pipeline.tenants.values():
                if tenant.device is None or tenant.device in reached:
                    continue
                if phases.kind_of(pipeline, tenant) is None:
                    idle.append(tenant.device)
                    continue
                reached[tenant.device] = True
                chosen.append(tenant.device)
                yield tenant.device
            for other in idle:
                if other not in reached:
                    reached[other] = True
                    chosen.append(other)
                    yield other


def tenant_of(node: str) -> str:
    """Of a node's id, ``<pipeline>/v<version>/<tenant>/<kind>``."""
    return node.split("/")[2]
