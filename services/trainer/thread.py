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

    def __init__(self, *, stop_timeout_s: float) -> None:
        """`stop_timeout_s`: below the grace that a node gives before it kills."""
        self._stop_timeout_s = stop_timeout_s
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="torch")
        self._stopped = threading.Event()

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def check(self) -> None:
        """Called by long work between its pieces; raises `StoppedError` after `stop`."""
        if self._stopped.is_set():
            raise StoppedError

    async def stop(self, last: Callable[[], None]) -> None:
        """End the running work at its next check, do `last` in the thread, take no more work; waits
        for this for a while at most."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        ending = asyncio.wrap_future(self._executor.submit(last))
        self._executor.shutdown(wait=False)
        await asyncio.wait([ending], timeout=self._stop_timeout_s)
