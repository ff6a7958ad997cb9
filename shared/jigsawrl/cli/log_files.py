"""Log files that grow for as long as a service is up: their ends are read, large ones put aside.

Used by `logs` and `supervisor`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MAX_BYTES = 64 * 2**20
"""From here on a log is put aside when its program starts again: two of that size are kept."""

BLOCK_BYTES = 64 * 1024


def last_lines(path: Path, num_lines: int, *, begin: int = 0, end: int | None = None) -> list[str]:
    """Of the bytes from `begin` to `end`; read backwards, so that a long file costs no more. Empty
    where there are none."""
    try:
        with path.open("rb") as file:
            start = file.seek(0, os.SEEK_END) if end is None else end
            data = b""
            while start > begin and data.count(b"\n") <= num_lines:
                size = min(BLOCK_BYTES, start - begin)
                start -= size
                file.seek(start)
                data = file.read(size) + data
    except OSError:
        return []
    lines = data.decode(errors="replace").splitlines()
    return lines[-num_lines:] if num_lines else []


def put_aside(path: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """Where it is large: as ``NAME.log.1``, in the place of the one before. Nobody may write it now."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > max_bytes:
            path.replace(path.with_name(f"{path.name}.1"))
