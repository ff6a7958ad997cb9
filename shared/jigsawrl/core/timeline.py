"""What came of playing a graph: when each node ran, and at which share.

`play` returns it; tests check it and `jigsaw graph` can draw it.
"""

from __future__ import annotations

import msgspec


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of time in which a node ran at one share; waits have no device and share 0."""

    node: str
    device: str | None
    share: float
    start_s: float
    end_s: float


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """What came of playing a graph; times are seconds from the start."""

    makespan_s: float
    finish_s: dict[str, float]
    """By node id."""
    pipeline_finish_s: dict[str, float]
    timeline: tuple[Span, ...]
    """In order of their ends."""
