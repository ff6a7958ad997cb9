"""`jigsaw logs`: what the processes of a daemon or a node on this machine wrote, and go on writing.

Called by `main`. A tenant's log lies with its node, so that a cluster's logs are read on the machine
of each node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.cli.log_files import BLOCK_BYTES, last_lines

POLL_S = 0.2


def show_logs(
    folder: Path,
    name: str | None,
    *,
    num_lines: int,
    follow: bool,
    write: Callable[[str], None] = print,
) -> int:
    """The last lines of each log that is meant, a block per log; with `follow` what comes after, as it
    comes, until interrupted."""
    # What comes while this is written is `_follow`'s.
    read = {path: _whole_bytes(path) for path in named(folder, name)}
    if not follow and not any(path.stat().st_size for path in read):
        write(f"nothing was written yet by {_names(read)}: they log what goes wrong")
    for path, end in read.items():
        for line in last_lines(path, num_lines, end=end if follow else None):
            write(f"{path.stem} | {line}")
    if follow:
        _follow(folder, name, read, write)
    return 0


def named(folder: Path, name: str | None) -> list[Path]:
    """Logs of a pipeline, a tenant or a program; all, where nothing is named. Raises `CommandError`
    where there is none."""
    found = sorted(
        path
        for pattern in ("logs/*.log", "nats/*.log", "node/logs/*.log", "nodes/*/logs/*.log")
        for path in folder.glob(pattern)
        if name is None or path.stem == name or path.stem.startswith(f"{name}.")
    )
    if not found:
        if name is None:
            what = (
                f"no logs in {folder}: nothing ran there; name a daemon's or a node's by --folder"
            )
        else:
            what = f"no log of {name} in {folder}; there are: {_names(named(folder, None))}"
        raise CommandError(what, status=EXIT_BAD_INPUT)
    return found


def _names(logs: Iterable[Path]) -> str:
    return ", ".join(sorted({path.stem for path in logs}))


def _whole_bytes(path: Path) -> int:
    """Up to the end of the last whole line."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = max(0, size - BLOCK_BYTES)
        file.seek(start)
        data = file.read(size - start)
    return start + data.rfind(b"\n") + 1 if b"\n" in data else start


def _follow(
    folder: Path, name: str | None, read: dict[Path, int], write: Callable[[str], None]
) -> None:
    while True:
        for path in named(folder, name):
            for line in _new_lines(path, read):
                write(f"{path.stem} | {line}")
        time.sleep(POLL_S)


def _new_lines(path: Path, read: dict[Path, int]) -> Iterator[str]:
    """Whole lines beyond what was read; a file that has shrunk is read from its begin."""
    start = read.get(path, 0)
    size = path.stat().st_size
    if size < start:
        start = 0
    with path.open("rb") as file:
        file.seek(start)
        data = file.read(size - start)
    whole = data[: data.rfind(b"\n") + 1]
    read[path] = start + len(whole)
    yield from whole.decode(errors="replace").splitlines()
