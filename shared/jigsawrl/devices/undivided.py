"""The actuator of device kinds that have none: divides nothing and says so."""

from __future__ import annotations

from collections.abc import Mapping

from jigsawrl.devices.base import Applied, Capability, check_shares


class UndividedActuator:
    """Tenants take turns as the driver likes: of n, each gets about 1/n while all want to run."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.capability = Capability(levels=None, change="live", latency_s=0.0)

    def apply(self, device: str, shares: Mapping[str, tuple[int, float]]) -> Applied:
        """See `Actuator.apply`."""
        check_shares(device, {tenant: share for tenant, (_, share) in shares.items()})
        return Applied(
            shares={tenant: 1 / len(shares) for tenant in shares},
            mechanism="none",
            fell_back=f"nothing divides devices of kind {self._kind}: their driver gives turns",
        )

    def restore(self) -> None:
        """Nothing to do."""
