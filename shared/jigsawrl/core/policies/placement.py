"""Where the tenants of a pipeline live: each on the device that has the fewest of its kind.

Used by the policies when they start a pipeline; moves nothing later.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jigsawrl.contract.message import Role
from jigsawrl.contract.spec import Device
from jigsawrl.core.state import Pipeline, State


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tenant shall live."""

    tenant: str
    role: Role
    node: str
    device: str | None


ON_DEVICES: tuple[Role, ...] = ("trainer", "rollout", "evaluation")
"""Roles that compute; environment and reward need no device."""


def devices_for(pipeline: Pipeline, state: State) -> list[Device]:
    """Devices of nodes that are up, of the kind asked for; GPUs, where there are any, for `auto`."""
    devices = [d for node in state.nodes.values() if node.up for d in node.devices]
    kind = pipeline.spec.device
    if kind == "auto":
        kind = "cuda" if any(d.kind == "cuda" for d in devices) else "cpu"
    return sorted(device for device in devices if device.kind == kind)


class Occupancy:
    """How many tenants of each role a device has, or is about to get."""

    def __init__(self, pipelines: Iterable[Pipeline]) -> None:
        """Of these pipelines."""
        self._counts: dict[str, dict[Role, int]] = {}
        for pipeline in pipelines:
            for tenant in pipeline.tenants.values():
                if tenant.device is not None:
                    self.add(tenant.device, tenant.role)

    def add(self, device: str, role: Role) -> None:
        """One more."""
        counts = self._counts.setdefault(device, {})
        counts[role] = counts.get(role, 0) + 1

    def order(self, device: str, role: Role) -> tuple[int, int]:
        """Less is better: fewest of that role, then fewest of all."""
        counts = self._counts.get(device, {})
        return counts.get(role, 0), sum(counts.values())


def place(
    pipeline: Pipeline, devices: list[Device], occupancy: Occupancy, *, apart: bool
) -> tuple[Place, ...] | None:
    """Places of all tenants that the pipeline lacks, noted in `occupancy`; members started by hand
    stand in for tenants of their role. Trainer ranks stay on one machine (they meet through files and
    the loopback interface). With `apart` rollout workers keep off the devices of the pipeline's trainer
    ranks where there are others. None where a tenant is needed and no device is there."""
    if not devices:
        return None
    members: dict[Role, int] = {}
    for tenant in pipeline.tenants.values():
        members[tenant.role] = members.get(tenant.role, 0) + 1
    places: list[Place] = []
    for role, count in _wanted(pipeline):
        for index in range(count - members.get(role, 0)):
            device = _choose(role, devices, occupancy, placed=places, apart=apart)
            places.append(
                Place(
                    tenant=f"{pipeline.name}.{role}{index}",
                    role=role,
                    node=device.node,
                    device=device.id if role in ON_DEVICES else None,
                )
            )
            if role in ON_DEVICES:
                occupancy.add(device.id, role)
    return tuple(places)


def _wanted(pipeline: Pipeline) -> list[tuple[Role, int]]:
    spec = pipeline.spec
    wanted: list[tuple[Role, int]] = [("environment", 1), ("reward", 1)]
    wanted += [("trainer", spec.num_trainer_ranks), ("rollout", spec.num_rollout_workers)]
    if spec.evaluation is not None:
        wanted.append(("evaluation", 1))
    return wanted


def _choose(
    role: Role, devices: list[Device], occupancy: Occupancy, *, placed: list[Place], apart: bool
) -> Device:
    if role not in ON_DEVICES:
        return devices[0]
    trained_on = {place.device for place in placed if place.role == "trainer"}
    if role == "trainer" and trained_on:
        node = next(place.node for place in placed if place.role == "trainer")
        devices = [device for device in devices if device.node == node]
    if role == "rollout" and apart:
        devices = [device for device in devices if device.id not in trained_on] or devices
    return min(devices, key=lambda device: (*occupancy.order(device.id, role), device))
