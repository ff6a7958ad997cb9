"""The scheduler's state as a run's folder tells it: the newest snapshot and the messages behind it.

Used by the programs that explain a run (`why`, `graph`); they need no running system, and see a run
that goes on as of its last segment file.
"""

from __future__ import annotations

from pathlib import Path

from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.state import State
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import read_snapshot, sequences_on_disk


def last_state(folder: Path) -> State:
    """Of a scheduler's state folder (``RUN/scheduler``); raises ValueError where it holds none."""
    sequences = sequences_on_disk(folder / "snapshots")
    scheduler = Scheduler()
    if sequences:
        snapshot = read_snapshot(folder / "snapshots", sequences[-1])
        scheduler = Scheduler.restore(snapshot.state)
    last = scheduler.state.sequence
    for entry in read_segments(folder / "events"):
        if entry.sequence <= last:
            continue
        if entry.sequence != last + 1:
            break  # the leader has not written what lies between yet
        last = entry.sequence
        try:
            event = EVENTS.decode(entry.payload)
        except UndecodableError:
            continue
        scheduler.handle(event, timestamp_s=entry.timestamp_s, sequence=entry.sequence)
    if not last:
        raise ValueError(f"{folder} holds neither snapshots nor events: give the folder of a run")
    return scheduler.state
