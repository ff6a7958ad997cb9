"""The actuator `cpu`: divides CPU slots among tenants that are pinned to them.

A slot is one core. The node pins each tenant to the core of its slot, with one thread of computation;
this module weighs the tenants against one another, by control groups where it can, else by priorities.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from jigsawrl.devices import kernel
from jigsawrl.devices.base import Applied, Capability, check_shares
from jigsawrl.devices.cgroups import ROOT, CgroupShares, Remove, find_v1, find_v2
from jigsawrl.devices.nice import NiceShares


class Mechanism(Protocol):
    """One way to weigh processes."""

    @property
    def mechanism(self) -> str:
        """For people."""

    def divide(self, device: str, shares: Mapping[str, tuple[int, float]]) -> dict[str, float]:
        """What each tenant gets; raises OSError where this machine does not let it."""

    def release(self, device: str) -> None:
        """Put one device back."""

    def restore(self) -> None:
        """Put all back."""


class CpuActuator:
    """Control group v2, else v1, else nice; chosen per device at its first division."""

    capability = Capability(levels=None, change="live", latency_s=0.05)
    """The kernel acts on new weights at its next scheduling tick; with slices of some milliseconds a
    new ratio shows within a few of them."""

    def __init__(
        self, *, root: Path = ROOT, proc: Path = kernel.PROC, remove: Remove = Path.rmdir
    ) -> None:
        self._mechanisms: list[Mechanism] = []
        self._reasons: list[str] = []
        autogroups = _reads_one(proc / "sys" / "kernel" / "sched_autogroup_enabled")
        for found in (find_v2(root), find_v1(root)):
            if isinstance(found, str):
                self._reasons.append(found)
                continue
            home = found.group_of("self", proc=proc)
            # The kernel groups only those by session who are in no other group.
            autogroups = autogroups and not found.weighs(home)
            if not os.access(home, os.W_OK):
                self._reasons.append(f"{home} is not writable")
            else:
                self._mechanisms.append(CgroupShares(found, proc=proc, remove=remove))
        self._nice = NiceShares(proc=proc, autogroups=autogroups)
        self._mechanisms.append(self._nice)
        self._failures: dict[str, list[str]] = {}
        """By device why each of the first mechanisms did not work there."""

    def apply(self, device: str, shares: Mapping[str, tuple[int, float]]) -> Applied:
        """See `Actuator.apply`."""
        check_shares(device, {tenant: share for tenant, (_, share) in shares.items()})
        failures = self._failures.setdefault(device, [])
        while True:
            mechanism = self._mechanisms[len(failures)]
            try:
                given = mechanism.divide(device, shares)
            except OSError as error:
                if mechanism is self._nice:
                    raise
                mechanism.release(device)
                failures.append(f"{mechanism.mechanism}: {error}")
            else:
                return Applied(
                    shares=given,
                    mechanism=mechanism.mechanism,
                    fell_back=self._fell_back(mechanism, failures),
                )

    def prospect(self) -> tuple[str, str | None]:
        """The mechanism that is tried first, and why none better; for people."""
        first = self._mechanisms[0]
        return first.mechanism, self._fell_back(first, [])

    def restore(self) -> None:
        """See `Actuator.restore`."""
        for mechanism in self._mechanisms:
            mechanism.restore()
        self._failures.clear()

    def _fell_back(self, mechanism: Mechanism, failures: list[str]) -> str | None:
        if mechanism is not self._nice:
            return None  # v1 divides as well as v2
        reasons = [*self._reasons, *failures]
        if self._nice.note is not None:
            reasons.append(self._nice.note)
        return "priorities only come near the shares: " + "; ".join(reasons)


def _reads_one(path: Path) -> bool:
    try:
        return path.read_text().strip() == "1"
    except FileNotFoundError:
        return False
