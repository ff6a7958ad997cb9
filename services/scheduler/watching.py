"""Who looks on while a leader leads (metrics, spans), as a protocol. None of them decides anything, and
none may raise: a fault in counting would depose the leader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import Event, SequencesFinished
from jigsawrl.core.state import State
from services.scheduler.journal import Journal
from services.scheduler.outgoing import Outgoing


class Watch(Protocol):
    """Called on the leader's event loop."""

    def leads(self, state: State, journal: Journal, outgoing: Outgoing) -> None:
        """It was elected. The objects change as it goes on."""

    def folded(
        self,
        stored: StoredEvent,
        commands: Sequence[Command],
        *,
        taken_s: float,
        decided: bool,
        ignored: bool,
    ) -> None:
        """One message behind its election; `decided` where a decision pass followed,
        `ignored` where the core made nothing of it: a repeat, or the word of a boot that is gone."""

    def ended(self) -> None:
        """It leads no longer; may come without `leads`."""


def is_ignored(event: Event, *, num_ignored: int) -> bool:
    """Whether the core, which ignored so many things in it, took nothing of an event. Of a list of
    sequences it may take some."""
    num_parts = len(event.finished) if isinstance(event, SequencesFinished) else 1
    return num_ignored >= max(1, num_parts)
