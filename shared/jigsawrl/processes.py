"""Child processes that are started again after a crash and cannot outlive their parent: what every
supervisor here shares.

Dying with the parent is Linux only (`prctl`); elsewhere children are stopped by their parent's orderly
end alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


FIRST_BACKOFF_S = 0.2
"""Before the first restart; doubles with every further failure in a row."""

MAX_BACKOFF_S = 5.0

MAX_FAILURES = 5
"""In a row: more is no accident."""

SHORT_LIFE_S = 60.0
"""A process that dies younger adds to the row of failures, one that lived longer begins a new row. A
fault that takes 30 s to show ends as surely as one that shows at once."""


class Restarts:
    """Says for one child, death by death, whether it is started again and after which pause."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_failures = 0
        self._started_s = clock()

    def started(self) -> None:
        """The child was started now."""
        self._started_s = self._clock()

    def pause_s(self) -> float | None:
        """The child died now: how long to wait before the next start; None = give it up."""
        if self._clock() - self._started_s > SHORT_LIFE_S:
            self._num_failures = 0
        self._num_failures += 1
        if self._num_failures >= MAX_FAILURES:
            return None
        return float(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._num_failures - 1)))


def die_with_parent(cores: Iterable[int] = ()) -> Callable[[], None]:
    """A ``preexec_fn``: SIGKILL for the child when the thread that started it ends, and, where
    `cores` are given, only those cores. Start children from a thread that lives as long as they."""
    pinned = set(cores)
    parent = os.getpid()

    def prepare() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before prctl took effect
                os._exit(1)
        if pinned:
            os.sched_setaffinity(0, pinned)

    return prepare
