"""What every share actuator offers, and the rules that hold for all of them.

The node calls actuators; they know processes and devices, but neither the bus nor the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, Protocol

import msgspec

TOLERANCE = 1e-9
"""Of a sum of shares: thirds and sevenths do not add up to 1 exactly."""


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What an actuator can do, for those who decide about shares."""

    levels: tuple[float, ...] | None
    """The shares that it can give; None = any."""
    change: Literal["live", "restart"]
    """Whether a running tenant's share can change, or only that of a new process."""
    latency_s: float
    """Until a change shows in what the tenants get."""


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """What really holds on a device from now on."""

    shares: dict[str, float]
    """By tenant; without those whose process is gone."""
    mechanism: str
    fell_back: str | None = None
    """Why it is not the best mechanism of this actuator; one line for people."""


class Actuator(Protocol):
    """Plug-in of the node. Calls may block for some milliseconds and never overlap."""

    @property
    def capability(self) -> Capability:
        """What it can do."""

    def apply(self, device: str, shares: Mapping[str, tuple[int, float]]) -> Applied:
        """Divide a device among these tenants, given as (process id, share), and no others: one that
        was named before and is not any more is let go. Raises ValueError where the shares are no
        division."""

    def restore(self) -> None:
        """Put everything back as it was before the first call."""


def check_shares(device: str, shares: Mapping[str, float]) -> None:
    """Raise ValueError unless each share lies in [0, 1] and all together are at most 1."""
    for tenant, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{device}: share {share} of {tenant} is not between 0 and 1")
    total = math.fsum(shares.values())
    if total > 1 + TOLERANCE:
        asked = ", ".join(f"{tenant} {share:g}" for tenant, share in shares.items())
        raise ValueError(f"{device}: shares sum to {total:g}, more than the device: {asked}")
