"""``python -m services.scheduler.replay STATE_DIR``: what the scheduler commanded, as JSON lines.

Folds the segment files of a run through the core alone: from its first message, or from any stored
snapshot, which gives the same commands byte for byte.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from jigsawrl.contract.commands import Command
from services.scheduler.recorded import events_after, scheduler_at


def replay(folder: Path, *, after: int = 0) -> Iterator[Command]:
    """Every command that the messages after `after` led to, in order; `after` is 0 or the sequence
    of a snapshot. Raises ValueError where the folder lacks one of them."""
    scheduler = scheduler_at(folder, after)
    recorded = events_after(folder, after)
    first = next(recorded, None)
    if first is None:
        raise ValueError(
            f"{folder / 'events'} holds no messages after {after}: give the state folder of a run"
        )
    for event, timestamp_s, sequence in itertools.chain([first], recorded):
        yield from scheduler.handle(event, timestamp_s=timestamp_s, sequence=sequence)


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
