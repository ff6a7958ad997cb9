"""Child processes that cannot outlive their parent: what every supervisor here shares.

Linux only (`prctl`); elsewhere children are stopped by their parent's orderly end alone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


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
