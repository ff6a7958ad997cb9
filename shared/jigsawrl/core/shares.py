"""Who has which share of a device: what a policy wants, what was commanded, what nodes applied.

A share is a weight of a work-conserving division: the fraction of the device that a tenant has while
all the others on it want to run; what one leaves idle, the others get. So tenants that take turns, as
trainer and rollout worker of one synchronous pipeline do, lose nothing by having a half each: whoever's
turn it is has the whole device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from jigsawrl.contract.commands import SetShares
from jigsawrl.contract.events import SharesApplied
from jigsawrl.contract.message import Worker
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Pipeline, State, Tenant

Wanted = dict[str, dict[str, float]]
"""Device id -> tenant id -> share; all tenants of the device that the scheduler placed."""

TOLERANCE = 1e-9
"""Of a sum of shares: sevenths do not add up to 1 exactly."""


def move_in(state: State, pipeline: Pipeline) -> None:
    """A pipeline starts: its tenants share devices from now on."""
    for tenant in pipeline.tenants.values():
        settle(state, tenant)


def settle(state: State, tenant: Tenant) -> None:
    """One shares its device from now on. Members that were started by hand live where nobody
    divides."""
    if tenant.node is not None and tenant.device is not None:
        state.residents.setdefault(tenant.device, []).append(tenant.id)
        state.undivided[tenant.device] = True


def move_out(state: State, pipeline: Pipeline) -> None:
    """It has ended: the others get what its tenants leave."""
    for tenant in pipeline.tenants.values():
        leave(state, tenant)


def leave(state: State, tenant: Tenant) -> None:
    """One shares its device no longer."""
    names = state.residents.get(tenant.device or "", [])
    if tenant.id in names:
        names.remove(tenant.id)
        state.undivided[tenant.device or ""] = True


def equal(state: State, *, devices: Iterable[str] | None = None) -> Wanted:
    """All tenants of a device have the same weight; of these devices, or of all."""
    chosen = state.residents if devices is None else devices
    return {
        device: {name: 1 / len(names) for name in names}
        for device in chosen
        if (names := state.residents.get(device))
    }


def command(state: State, wanted: Wanted, outbox: Outbox) -> None:
    """Remember what is wanted, and tell the node of each device on which something changed for a
    tenant that it runs; the others are told by their `StartTenant`. Comes before the starts of the same
    pass: the node makes room first."""
    for device, shares in wanted.items():
        assert math.fsum(shares.values()) <= 1 + TOLERANCE, f"{device}: {shares}"
        changed: Worker | None = None
        for name, share in shares.items():
            tenant = find(state, name)
            assert tenant is not None, name
            assert tenant.device == device, name
            assert tenant.node is not None, name
            node = state.nodes.get(tenant.node)
            if tenant.share != share and node is not None and tenant.started_on == node.boot:
                changed = Worker(id=node.id, boot=node.boot)
            tenant.share = share
        if changed is not None:
            outbox.add(SetShares(**outbox.to(changed), device=device, shares=tuple(shares.items())))


def applied(state: State, event: SharesApplied) -> None:
    """A node divided a device."""
    node = state.nodes.get(event.node.id)
    if node is None or node.boot != event.node.boot:
        state.num_ignored += 1
        return
    for entry in event.shares:
        tenant = find(state, entry.tenant)
        believable = 0 <= entry.asked <= 1 and 0 <= entry.applied <= 1  # no NaN either
        here = tenant is not None and (tenant.node, tenant.device) == (node.id, event.device)
        if tenant is None or not here or not believable:
            state.num_ignored += 1
        else:
            tenant.applied_share = entry.applied


def find(state: State, tenant: str) -> Tenant | None:
    """A tenant of any pipeline by its id, ``<pipeline>.<role><index>``."""
    pipeline = state.pipelines.get(tenant.partition(".")[0])
    return None if pipeline is None else pipeline.tenants.get(tenant)
