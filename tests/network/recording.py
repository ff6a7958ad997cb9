"""What happened in a run, from what its scheduler recorded: by the servers' own time stamps, and with
what the decisions made of each message. Needs no running system."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

from jigsawrl.contract.commands import Command, StartTenant, StopTenant
from jigsawrl.contract.events import Event, SequencesFinished, SubStagesEnded, WorkerStarted
from jigsawrl.contract.message import Worker
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.recorded import events_after

GENERATING = ("prefill", "bulk_decode", "tail_decode")


class Moment(NamedTuple):
    """One message of the event stream, and what came of it."""

    event: Event
    at_s: float
    commands: list[Command]
    was_ignored: bool


class Recording:
    """A run from its first message on."""

    def __init__(self, state: Path) -> None:
        scheduler = Scheduler()
        self.moments: list[Moment] = []
        for event, at_s, sequence in events_after(state, 0):
            before = scheduler.state.num_ignored
            commands = scheduler.handle(event, timestamp_s=at_s, sequence=sequence)
            ignored = scheduler.state.num_ignored > before
            self.moments.append(Moment(event, at_s, commands, ignored))

    def boots_on(self, node: str, *, until_s: float) -> set[Worker]:
        """Processes of tenants that a node had started by then."""
        return {
            moment.event.worker
            for moment in self.moments
            if isinstance(moment.event, WorkerStarted)
            and moment.event.node == node
            and moment.at_s <= until_s
        }

    def orders(
        self, kind: type[StartTenant] | type[StopTenant], *, after_s: float
    ) -> dict[str, float]:
        """By tenant the first order of a kind, by when the message came that led to it."""
        found: dict[str, float] = {}
        for moment in self.moments:
            for command in moment.commands if moment.at_s > after_s else ():
                if isinstance(command, kind):
                    found.setdefault(command.tenant, moment.at_s)
        return found

    def told_by(self, boots: set[Worker], *, after_s: float) -> list[Moment]:
        """What these processes had to say later."""
        return [
            moment
            for moment in self.moments
            if moment.at_s > after_s and getattr(moment.event, "worker", None) in boots
        ]

    def generates_s(self, tenant: str, *, after_s: float, but: set[Worker]) -> float | None:
        """When a tenant's next process first told of tokens."""
        for moment in self.moments:
            event = moment.event
            if moment.at_s <= after_s or not isinstance(event, SequencesFinished | SubStagesEnded):
                continue
            if event.worker.id != tenant or event.worker in but:
                continue
            if isinstance(event, SequencesFinished) or any(
                span.kind in GENERATING for span in event.spans
            ):
                return moment.at_s
        return None

    def longest_gap_s(
        self, after_s: float, *, within_s: float, of: type[Event] = Event
    ) -> tuple[float, float]:
        """Between two messages of a kind, of those that end in the time given; (its length, when it
        ended)."""
        times = [moment.at_s for moment in self.moments if isinstance(moment.event, of)]
        return max(
            (end - start, end)
            for start, end in itertools.pairwise(times)
            if after_s < end < after_s + within_s
        )
