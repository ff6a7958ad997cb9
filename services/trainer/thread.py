"""The one thread in which a trainer's torch work runs, so that the event loop never waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class StoppedError(Exception):
    """The process was told to end; raised inside the work at its next check."""


class TorchThread:
    """Runs functions one after the other; `stop` makes the running one end at its next check."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._stopped = threading.Event()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def check(self) -> None:
        """Called by long work between its pieces; raises `StoppedError` after `stop`."""
        if self._stopped.is_set():
            raise StoppedError

    def stop(self) -> None:
        """Take no more work and end the running one; does not wait."""
        self._stopped.set()
        self._executor.shutdown(wait=False, cancel_futures=True)
