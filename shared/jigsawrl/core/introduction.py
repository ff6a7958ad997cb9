"""What a node said of itself; part of `State`, kept by `introductions`."""

from __future__ import annotations

import msgspec


class Introduction(msgspec.Struct):
    """One node's newest boot."""

    boot: str
    schema: int
    code_version: str
    clock_skew_s: float | None = None
    """Its wall clock less the server's, as of its last message, and too small by that one's way."""
    left: bool = False
    """It said that it stops."""
    refused: str | None = None
    """Why it gets no work: one line that says what to do."""
