"""Who looks on while a leader leads (metrics, spans), as a protocol. None of them decides anything, and
none may raise: a fault in counting would depose the leader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.core.state import State
from services.scheduler.journal import Journal
from services.scheduler.outgoing import Outgoing


class Watch(Protocol):
    """Called on the leader's event loop."""

    def leads(self, state: State, journal: Journal, outgoing: Outgoing) -> None:
        """It was elected. The objects change as it goes on."""

    def folded(
        self, stored: StoredEvent, commands: Sequence[Command], *, taken_s: float, decided: bool
    ) -> None:
        """One message behind its election; `decided` where a decision pass followed."""

    def ended(self) -> None:
        """It leads no longer; may come without `leads`."""
