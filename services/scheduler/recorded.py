"""What a run's folder tells of its scheduler: snapshots, and the messages of the event stream.

Used by the programs that explain or repeat a run (`why`, `graph`, `trace`, `replay`); they need no
running system, and see a run that goes on as of its last segment file.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.contract.events import Event
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.state import State
from services.scheduler.segments import Entry, read_segments
from services.scheduler.snapshots import read_snapshot, sequences_on_disk


class GapError(ValueError):
    """The segment files lack messages; says which."""


class Recorded(NamedTuple):
    """One message of the event stream."""

    event: Event
    timestamp_s: float
    sequence: int


def events_of(folder: Path) -> Iterator[Recorded]:
    """All that a scheduler's state folder (``RUN/scheduler``) holds, in order; raises ValueError for a
    damaged file."""
    return _decoded(read_segments(folder / "events"))


def events_after(folder: Path, sequence: int) -> Iterator[Recorded]:
    """Those behind a message (0: from the first); raises `GapError` where the next one is missing."""
    return _decoded(_without_gaps(folder / "events", sequence))


def scheduler_at(folder: Path, sequence: int) -> Scheduler:
    """As the snapshot of that message has it (0: a new one); raises ValueError where there is none."""
    if not sequence:
        return Scheduler()
    return Scheduler.restore(read_snapshot(folder / "snapshots", sequence).state)


def last_state(folder: Path) -> State:
    """Of a state folder; raises ValueError where it holds none."""
    scheduler = scheduler_at(folder, max(sequences_on_disk(folder / "snapshots"), default=0))
    # Behind a gap lies what the leader has not written yet.
    with contextlib.suppress(GapError):
        for event, timestamp_s, sequence in events_after(folder, scheduler.state.sequence):
            scheduler.handle(event, timestamp_s=timestamp_s, sequence=sequence)
    if not scheduler.state.sequence:
        raise ValueError(f"{folder} holds neither snapshots nor events: give the folder of a run")
    return scheduler.state


def _decoded(entries: Iterable[Entry]) -> Iterator[Recorded]:
    """Without what nobody can decode: the leader skipped it as a dead letter, too."""
    for entry in entries:
        with contextlib.suppress(UndecodableError):
            yield Recorded(EVENTS.decode(entry.payload), entry.timestamp_s, entry.sequence)


def _without_gaps(events: Path, sequence: int) -> Iterator[Entry]:
    expected = sequence + 1
    for entry in read_segments(events):
        if entry.sequence < expected:
            continue
        if entry.sequence != expected:
            raise GapError(
                f"{events} lacks messages {expected} to {entry.sequence - 1}: give the folder of a"
                " run whose segment files are complete, or a later snapshot with --after"
            )
        expected += 1
        yield entry


def print_lines(lines: Iterable[str]) -> None:
    """To standard output, as far as somebody reads: ``jigsaw graph RUN | head`` is no failure."""
    try:
        for line in lines:
            print(line)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end, and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
