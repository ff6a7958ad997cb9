"""What `jigsaw profile` measured on one kind of device: a file, and part of `LeaderElected`."""

from __future__ import annotations

import msgspec

from jigsawrl.contract.message import Count, SubStageKind

MISSING_PAIR_FACTOR = 0.8
"""Of the speed beside a pair that nobody profiled. Conservative: two tenants of one GPU that split
its SMs seldom cost each other more than a fifth, so an unknown pair is never chosen for its gain."""


class SlowdownRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement: the speed of `kind` at `share`, alone or beside another sub-stage."""

    kind: SubStageKind
    share: float
    """Fraction of the device, above 0."""
    beside: SubStageKind | None = None
    """What ran next to it; None = nothing."""
    beside_share: float | None = None
    speed: float
    """Fraction of its full speed alone on the device: 0.4 = takes 2.5 times as long."""


class SlowdownProfile(msgspec.Struct, frozen=True, kw_only=True, cache_hash=True):
    """How fast sub-stages run at shares of a device, alone and beside each other."""

    device_kind: str
    """``cpu``, or a GPU's product name: numbers of one say nothing about another."""
    source: str
    """Where the numbers come from, for people: a command and machine, or a paper and table."""
    rows: tuple[SlowdownRow, ...] = ()
    missing_pair_factor: float = MISSING_PAIR_FACTOR
    """Beside a kind that no row names; 1 = no interference."""


class DecodeCost(msgspec.Struct, frozen=True, kw_only=True):
    """An iteration of decoding at one batch size."""

    num_sequences: Count
    iteration_s: float
    """Median."""


class DeviceProfile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    slowdown: SlowdownProfile
    tail_sequences: Count
    """Decoding so many sequences or fewer is a tail: an iteration costs at most 1.2 times that of
    one."""
    decode_s: tuple[DecodeCost, ...] = ()
    """What `tail_sequences` was read from."""
