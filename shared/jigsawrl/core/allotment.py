"""What the policy `rlix` remembers between decisions: part of the state, so that replays agree."""

from __future__ import annotations

import msgspec


class Request(msgspec.Struct, frozen=True):
    """Of one pipeline's trainer for the devices of its ranks."""

    tier: int
    """Lower comes first."""
    sequence: int
    """Stream sequence of the message that it arose with: of one tier the oldest comes first."""
    granted: bool = False


class Allotment(msgspec.Struct):
    """Who has which device."""

    requests: dict[str, Request] = {}
    """By pipeline."""
    generating: list[str] = []
    """Pipelines that got workers since they last had nothing to generate; they may have none now."""
    active: dict[str, tuple[str, ...]] = {}
    """By pipeline: rollout workers that have their device."""
    signature: str = ""
    """Of the situation planned for last."""
    sequence: int = -1
    """Stream sequence of the message planned for last."""
