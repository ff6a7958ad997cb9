"""The actuator `simulated`: gives what it is asked for and remembers it. For tests and simulation."""

from __future__ import annotations

from collections.abc import Mapping

from jigsawrl.devices.base import Applied, Capability, check_shares


class SimulatedActuator:
    """Gives any share, or the levels of the capability that it is made with."""

    def __init__(self, capability: Capability | None = None) -> None:
        self.capability = capability or Capability(levels=None, change="live", latency_s=0.0)
        self.divided: dict[str, dict[str, tuple[int, float]]] = {}
        """By device what holds now: tenant -> (process id, share)."""
        self.num_restored = 0

    def apply(self, device: str, shares: Mapping[str, tuple[int, float]]) -> Applied:
        """See `Actuator.apply`."""
        check_shares(device, {tenant: share for tenant, (_, share) in shares.items()})
        given = {tenant: self._level(share) for tenant, (_, share) in shares.items()}
        self.divided[device] = {t: (pid, given[t]) for t, (pid, _) in shares.items()}
        return Applied(shares=given, mechanism="simulated")

    def restore(self) -> None:
        """See `Actuator.restore`."""
        self.divided.clear()
        self.num_restored += 1

    def _level(self, share: float) -> float:
        """The highest level that is not above: rounding up could break the sum."""
        levels = self.capability.levels
        if levels is None:
            return share
        return max((level for level in levels if level <= share), default=min(levels))
