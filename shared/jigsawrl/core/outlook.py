"""What the policy `jigsaw` remembers between decisions: part of the state, so that replays agree."""

from __future__ import annotations

import msgspec

MAX_DECISIONS = 64
"""Kept for people; older ones are in the recorded events."""


class Decided(msgspec.Struct, frozen=True, kw_only=True):
    """One look-ahead decision."""

    now_s: float
    """Stream time."""
    shares: dict[str, float]
    """By node id; 0 = held."""
    moves: dict[str, str]
    """Node id -> device."""
    makespan_s: float
    """Predicted for the steps looked at."""
    default_makespan_s: float
    """The same without look-ahead."""
    num_expanded: int
    num_candidates: int = 0
    until: dict[str, int] = {}
    """By pipeline: the version with which the steps looked at end."""


class Pace(msgspec.Struct):
    """How a pipeline with a latency cap gets on, against its time alone; see `core.pace`."""

    since_s: float | None = None
    """Stream time at which the step under way began; None before the first version."""
    elapsed_s: float = 0.0
    """Of the steps that ended."""
    alone_s: float = 0.0
    """What those would have taken alone."""
    step_alone_s: float = 0.0
    """What the last of them would have; 0 before any history."""
    ahead_alone_s: float = 0.0
    """What was predicted at the beginning of the step under way takes alone."""
    num_unknown: int = 0
    """Ended steps that are not in `alone_s`: there was no history yet."""


class Outlooks(msgspec.Struct):
    """Of the whole cluster."""

    due: dict[str, bool] = {}
    """Devices on which something changed that was not decided on yet (a dict as an ordered set)."""
    seen: dict[str, tuple[int | None, bool]] = {}
    """By pipeline: which version it trained from, and whether it was evaluated, when it was looked at
    last."""
    next_s: float = 0.0
    """Stream time before which nothing is decided: searching costs time."""
    wanted: dict[str, dict[str, float]] = {}
    """Device -> tenant -> share, as decided last for the tenants that live there."""
    merges: dict[str, dict[str, str]] = {}
    """By pipeline: rollout worker -> the one that takes over all that it generates."""
    held_since_s: dict[str, float] = {}
    """By node id: stream time since which a ready node has had no share."""
    late: list[str] = []
    """Pipelines that are behind their latency caps."""
    decisions: list[Decided] = []
