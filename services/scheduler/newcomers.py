"""Lines in the leader's log about nodes that it refuses, or whose clock is off: each once per boot.

The core keeps what they said of themselves (`core.introductions`) and decides; here it is only told.
"""

from __future__ import annotations

import structlog

from jigsawrl.clocks import skew_text
from jigsawrl.contract.events import Event, Heartbeat, NodeStarted
from jigsawrl.core.state import State

log = structlog.get_logger()


class Newcomers:
    """What one leader has told of nodes."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], str] = {}
        """By node: its boot, and the kind of what was told of it."""

    def look(self, state: State, event: Event) -> None:
        """After the fold of an event."""
        if not isinstance(event, NodeStarted | Heartbeat):
            return
        name = event.node.id
        known = state.introductions.get(name)
        if known is None or known.boot != event.node.boot:
            return
        if known.refused is not None:
            self._tell("refused", name, known.boot, known.refused)
        skew = skew_text(name, known.clock_skew_s)
        if skew is not None:
            self._tell("clock", name, known.boot, skew)

    def _tell(self, kind: str, name: str, boot: str, text: str) -> None:
        if self._told.get((kind, name)) != boot:
            self._told[kind, name] = boot
            log.warning(text, node=name)
