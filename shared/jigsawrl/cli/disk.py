"""Tells when the disk of a run is full. Everybody who stores something then waits, and the status names
a trainer or a rollout worker, not the disk.

Used by `run_command`. Once there is room, nats-server is started again: a stream of which it could not
store a message refuses all later ones for as long as the server lives.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from jigsawrl.bus.server import needed_store_bytes

LEAST_FREE_BYTES = 16 * 1024**2
"""Two messages of the largest size; the first that find no room are larger than the last that do."""

PERIOD_S = 5.0


class Disk:
    """What is to be said of the free bytes of one disk, once each time that it fills."""

    def __init__(self, folder: Path, *, needed_bytes: int) -> None:
        """`needed_bytes` are what nats-server wants free before it starts: room begins there."""
        self._folder = folder
        self._needed_bytes = needed_bytes
        self._full = False

    @property
    def is_full(self) -> bool:
        """As of the last look."""
        return self._full

    def notice(self, free_bytes: int) -> str | None:
        """A line for people where that changed."""
        was_full = self._full
        self._full = free_bytes < (self._needed_bytes if was_full else LEAST_FREE_BYTES)
        if self._full == was_full:
            return None
        if not self._full:
            return f"the disk of {self._folder} has room again"
        return (
            f"the disk of {self._folder} is full ({free_bytes} bytes free): nothing can be stored, and"
            f" who wants to waits; free {self._needed_bytes} bytes, and it goes on"
        )


async def watch_disk(
    folder: Path, on_notice: Callable[[str], None], *, on_room: Callable[[], Awaitable[None]]
) -> None:
    """Until cancelled; `on_room` when a full disk has room again."""
    disk = Disk(folder, needed_bytes=needed_store_bytes())
    while True:
        try:
            told = disk.notice(shutil.disk_usage(folder).free)
        except OSError:  # the folder was deleted: others say so
            told = None
        if told is not None:
            on_notice(told)
            if not disk.is_full:
                await on_room()
        await asyncio.sleep(PERIOD_S)
