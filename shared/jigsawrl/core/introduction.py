"""What a node said of itself; part of `State`, kept by `introductions`."""

from __future__ import annotations

import msgspec


class Introduction(msgspec.Struct):
    """One node's newest boot."""

    boot: str
    schema: int
    code_version: str
    clock_skew_s: float | None = None
    """Its wall clock less the server's, and too small by the way of its messages: the greater of what
    its last two say, since one that waited out an outage makes a clock look late by its length."""
    last_skew_s: float | None = None
    """What its last message says."""
    left: bool = False
    """It said that it stops."""
    refused: str | None = None
    """Why it gets no work: one line that says what to do."""
