"""Tells when the disk of a run is full. Everybody who stores something then waits, and the status names
a trainer or a rollout worker, not the disk.

Used by `run_command`. It stops nothing: who waits goes on once there is room.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

LEAST_FREE_BYTES = 16 * 1024**2
"""Two messages of the largest size; the first that find no room are larger than the last that do."""

PERIOD_S = 5.0


class Disk:
    """What is to be said of the free bytes of one disk, once each time that it fills."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._full = False

    def notice(self, free_bytes: int) -> str | None:
        """A line for people where that changed."""
        was_full, self._full = self._full, free_bytes < LEAST_FREE_BYTES
        if self._full == was_full:
            return None
        if not self._full:
            return f"the disk of {self._folder} has room again"
        return (
            f"the disk of {self._folder} is full ({free_bytes} bytes free): nothing can be stored, and"
            " who wants to waits; free some space"
        )


async def watch_disk(folder: Path, on_notice: Callable[[str], None]) -> None:
    """Until cancelled."""
    disk = Disk(folder)
    while True:
        try:
            told = disk.notice(shutil.disk_usage(folder).free)
        except OSError:  # the folder was deleted: others say so
            told = None
        if told is not None:
            on_notice(told)
        await asyncio.sleep(PERIOD_S)
