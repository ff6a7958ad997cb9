"""``python -m services.scheduler.replay SEGMENTS_DIR``: what the scheduler commanded, as JSON lines.

Folds the segment files of a run through the core alone. Needs the run from its first message on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.contract.commands import Command
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.segments import read_segments


def replay(folder: Path) -> Iterator[Command]:
    """Every command of the run, in order."""
    scheduler = Scheduler(policy=Serial())
    expected = 1
    for entry in read_segments(folder):
        if entry.sequence != expected:
            raise ValueError(
                f"{folder} lacks messages {expected} to {entry.sequence - 1}: give the folder of a"
                " run whose segment files are complete"
            )
        expected += 1
        try:
            event = EVENTS.decode(entry.payload)
        except UndecodableError:
            continue  # The live leader skipped it as a dead letter, too.
        yield from scheduler.handle(event, timestamp_s=entry.timestamp_s, sequence=entry.sequence)
    if expected == 1:
        raise ValueError(f"{folder} holds no segment files: give the folder DIR/events of a run")


def main() -> None:
    """Print them."""
    arguments = argparse.ArgumentParser(prog="python -m services.scheduler.replay")
    arguments.add_argument("segments", type=Path, metavar="SEGMENTS_DIR")
    folder: Path = arguments.parse_args().segments
    try:
        for command in replay(folder):
            sys.stdout.buffer.write(msgspec.json.encode(command) + b"\n")
    except ValueError as error:
        sys.exit(f"replay: {error}")


if __name__ == "__main__":
    main()
