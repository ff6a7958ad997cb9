"""Where the tenants of a pipeline live: each on the device that has the fewest of its kind, of those
that have the memory it needs.

Used by the policies when they start a pipeline; moves nothing later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from heapq import heapify, heappop, heapreplace
from typing import Literal

import msgspec

from jigsawrl.contract.message import Role
from jigsawrl.contract.spec import Device
from jigsawrl.core.state import Pipeline, State, Tenant


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tenant shall live."""

    tenant: str
    role: Role
    node: str
    device: str | None


ON_DEVICES: tuple[Role, ...] = ("trainer", "rollout", "evaluation")
"""Roles that compute; environment and reward need no device."""

_APART: dict[Role, Role] = {"rollout": "trainer", "trainer": "rollout"}
"""Whose devices are kept off, whichever of them is placed first."""


def devices_for(pipeline: Pipeline, state: State) -> list[Device]:
    """Devices of nodes that take tenants, of the kind asked for; GPUs, where there are any, for
    `auto`."""
    return of_kind(
        pipeline, [d for node in state.nodes.values() if node.open for d in node.devices]
    )


def of_kind(pipeline: Pipeline, devices: list[Device]) -> list[Device]:
    """Those of `devices` that the pipeline may live on."""
    kind = pipeline.spec.device
    if kind == "auto":
        kind = "cuda" if any(d.kind == "cuda" for d in devices) else "cpu"
    return sorted(device for device in devices if device.kind == kind)


class Occupancy:
    """How many tenants of each role a device has, or is about to get, and the memory they need."""

    def __init__(self, pipelines: Iterable[Pipeline]) -> None:
        """Of these pipelines."""
        self._counts: dict[str, dict[Role, int]] = {}
        self._used_bytes: dict[str, int] = {}
        for pipeline in pipelines:
            for tenant in pipeline.tenants.values():
                if tenant.device is not None:
                    self.add(tenant.device, tenant.role, pipeline.spec.memory.of(tenant.role))

    def alone(self, pipeline: Pipeline) -> Occupancy:
        """The same memory, but only this pipeline's tenants count: those of others never work at the
        same time."""
        own = Occupancy([pipeline])
        own._used_bytes = self._used_bytes
        return own

    def add(self, device: str, role: Role, num_bytes: int) -> None:
        """One more."""
        counts = self._counts.setdefault(device, {})
        counts[role] = counts.get(role, 0) + 1
        self._used_bytes[device] = self._used_bytes.get(device, 0) + num_bytes

    def remove(self, device: str, role: Role, num_bytes: int) -> None:
        """One that was added does not come after all."""
        self._counts[device][role] -= 1
        self._used_bytes[device] -= num_bytes

    def order(self, device: str, role: Role) -> tuple[int, int]:
        """Less is better: fewest of that role, then fewest of all."""
        counts = self._counts.get(device, {})
        return counts.get(role, 0), sum(counts.values())

    def free_bytes(self, device: Device) -> int:
        """What its tenants leave."""
        return device.memory_bytes - self._used_bytes.get(device.id, 0)


def place(
    pipeline: Pipeline, devices: list[Device], occupancy: Occupancy, *, apart: bool
) -> tuple[Place, ...] | None:
    """Places of all tenants that the pipeline lacks, noted in `occupancy`; members started by hand
    stand in for tenants of their role. Trainer ranks stay on one machine (they meet through files and
    the loopback interface). With `apart` rollout workers keep off the devices of the pipeline's trainer
    ranks where there are others. None where a tenant is needed and no device has room for it; where the
    usual order finds none, the roomiest devices are tried first, then the tightest that do, in both
    orders of roles, and each machine for the trainer."""
    nodes = list(dict.fromkeys(device.node for device in devices))
    missing = _missing(pipeline)
    for first, by_need in _TRIES:
        for home in (None, *nodes) if pipeline.spec.num_trainer_ranks > 1 else (None,):
            wish = _Wish(apart=apart, first=first, by_need=by_need, home=home)
            places = _place(pipeline, missing, devices, occupancy, wish)
            if places is not None:
                return places
    return None


def place_again(
    pipeline: Pipeline, tenants: list[Tenant], devices: list[Device], occupancy: Occupancy
) -> tuple[Place, ...] | None:
    """New places of tenants of one role of a pipeline that runs, noted in `occupancy`; trainer ranks
    stay on one machine. None where not all of them find room."""
    missing = [(tenant.role, tenant.id) for tenant in tenants]
    staying = tuple(
        Place(tenant=tenant.id, role=tenant.role, node=tenant.node, device=tenant.device)
        for tenant in pipeline.tenants.values()
        if tenant not in tenants and tenant.node is not None
    )
    nodes = list(dict.fromkeys(device.node for device in devices))
    for home in (None, *nodes) if len(tenants) > 1 else (None,):
        wish = _Wish(apart=pipeline.spec.pipeline_depth > 1, first="emptiest", home=home)
        places = _place(pipeline, missing, devices, occupancy, wish, staying=staying)
        if places is not None:
            return places
    return None


First = Literal["emptiest", "roomiest", "tightest"]
"""The device with the fewest tenants, with the most memory free, or with the least that is enough."""

_TRIES: tuple[tuple[First, bool], ...] = (
    ("emptiest", False),
    ("roomiest", False),
    ("tightest", False),
    ("roomiest", True),
    ("tightest", True),
)
"""(first, by_need); the rest leaves room for the large where the first would take it with the small."""


class _Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How devices are chosen."""

    apart: bool
    first: First
    by_need: bool = False
    """Who needs most memory chooses first, instead of the trainer."""
    home: str | None
    """The trainer's machine; None = that of its first rank."""


def _place(
    pipeline: Pipeline,
    missing: list[tuple[Role, str]],
    devices: list[Device],
    occupancy: Occupancy,
    wish: _Wish,
    *,
    staying: tuple[Place, ...] = (),
) -> tuple[Place, ...] | None:
    """Of the `missing` tenants (role, id), beside those that stay."""
    if not devices:
        return None
    places: list[Place] = []
    memory = pipeline.spec.memory
    if wish.by_need:
        missing = sorted(missing, key=lambda one: -memory.of(one[0]) if one[0] in ON_DEVICES else 0)
    candidates: _Candidates | None = None
    for role, name in missing:
        if candidates is None or candidates.role != role or candidates.home is None:
            placed = [*staying, *places]
            candidates = _Candidates(role, devices, occupancy, memory.of(role), placed, wish)
        device = candidates.take()
        if device is None:
            for one in places:
                if one.device is not None:
                    occupancy.remove(one.device, one.role, memory.of(one.role))
            return None
        places.append(
            Place(
                tenant=name,
                role=role,
                node=device.node,
                device=device.id if role in ON_DEVICES else None,
            )
        )
        if role in ON_DEVICES:
            occupancy.add(device.id, role, memory.of(role))
    return tuple(places)


def _missing(pipeline: Pipeline) -> list[tuple[Role, str]]:
    members = Counter(tenant.role for tenant in pipeline.tenants.values())
    return [
        (role, f"{pipeline.name}.{role}{index}")
        for role, count in _wanted(pipeline)
        for index in range(count - members[role])
    ]


def _wanted(pipeline: Pipeline) -> list[tuple[Role, int]]:
    spec = pipeline.spec
    wanted: list[tuple[Role, int]] = [("environment", 1), ("reward", 1)]
    wanted += [("trainer", spec.num_trainer_ranks), ("rollout", spec.num_rollout_workers)]
    if spec.evaluation is not None:
        wanted.append(("evaluation", 1))
    return wanted


class _Candidates:
    """Devices for tenants of one role that are placed one after the other, the best first: looked
    through once, not once per tenant, as there may be thousands of both."""

    def __init__(
        self,
        role: Role,
        devices: list[Device],
        occupancy: Occupancy,
        num_bytes: int,
        placed: list[Place],
        wish: _Wish,
    ) -> None:
        """`placed`: the pipeline's tenants so far."""
        self.role, self._occupancy, self._num_bytes = role, occupancy, num_bytes
        self._devices = devices
        self._sign = {"emptiest": 0, "roomiest": -1, "tightest": 1}[wish.first]
        self.home: str | None = ""
        """Of a trainer: its machine, None before its first rank is placed."""
        if role == "trainer":
            first = (place.node for place in placed if place.role == "trainer")
            self.home = next(first, wish.home)
            self._devices = [d for d in devices if self.home in (None, d.node)]
        taken: set[str | None] = set()
        if wish.apart and role in _APART:
            taken = {place.device for place in placed if place.role == _APART[role]}
        self._is_apart = bool(taken)
        self._fill(taken)

    def take(self) -> Device | None:
        """The best one with room, which the caller notes in the occupancy; None where none has."""
        if self.role not in ON_DEVICES:
            return self._devices[0]
        while True:
            while self._heap:
                key, device = self._heap[0]
                now = self._key(device)
                if self._occupancy.free_bytes(device) < self._num_bytes:
                    heappop(self._heap)
                elif now != key:
                    heapreplace(self._heap, (now, device))
                else:
                    return device
            if not self._is_apart:
                return None
            self._is_apart = False
            self._fill(set())

    def _fill(self, taken: set[str | None]) -> None:
        devices = self._devices if self.role in ON_DEVICES else []
        self._heap = [(self._key(d), d) for d in devices if d.id not in taken]
        heapify(self._heap)

    def _key(self, device: Device) -> tuple[int, int, int]:
        """Less is better. Only that of the device taken last changes: it gets a tenant more."""
        free_bytes = self._sign * self._occupancy.free_bytes(device) if self._sign else 0
        return (free_bytes, *self._occupancy.order(device.id, self.role))
