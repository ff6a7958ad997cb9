"""``python -m services.scheduler.replay STATE_DIR``: what the scheduler commanded, as JSON lines.

Folds the segment files of a run through the core alone: from its first message, or from any stored
snapshot, which gives the same commands byte for byte.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.contract.commands import Command
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import read_snapshot


def replay(folder: Path, *, after: int = 0) -> Iterator[Command]:
    """Every command that the messages after `after` led to, in order; `after` is 0 or the sequence
    of a snapshot. Raises ValueError where the folder lacks one of them."""
    scheduler = Scheduler()
    if after:
        snapshot = read_snapshot(folder / "snapshots", after)
        scheduler = Scheduler.restore(snapshot.state)
    events = folder / "events"
    expected = after + 1
    for entry in read_segments(events):
        if entry.sequence <= after:
            continue
        if entry.sequence != expected:
            raise ValueError(
                f"{events} lacks messages {expected} to {entry.sequence - 1}: give the folder of a"
                " run whose segment files are complete, or a later snapshot with --after"
            )
        expected += 1
        try:
            event = EVENTS.decode(entry.payload)
        except UndecodableError:
            continue  # The live leader skipped it as a dead letter, too.
        yield from scheduler.handle(event, timestamp_s=entry.timestamp_s, sequence=entry.sequence)
    if expected == after + 1:
        raise ValueError(
            f"{events} holds no messages after {after}: give the state folder of a run"
        )


def main() -> None:
    """Print them."""
    arguments = argparse.ArgumentParser(prog="python -m services.scheduler.replay")
    arguments.add_argument("folder", type=Path, metavar="STATE_DIR", help="RUN/scheduler of a run")
    arguments.add_argument(
        "--after", type=int, default=0, metavar="SEQUENCE", help="begin at this snapshot"
    )
    options = arguments.parse_args()
    try:
        for command in replay(options.folder, after=options.after):
            sys.stdout.buffer.write(msgspec.json.encode(command) + b"\n")
    except ValueError as error:
        sys.exit(f"replay: {error}")


if __name__ == "__main__":
    main()
