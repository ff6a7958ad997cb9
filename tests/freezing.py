"""Stops a process, and knows that it stands still."""

from __future__ import annotations

import os
import signal
import time

import psutil

WAIT_S = 5.0


def freeze(pid: int) -> None:
    """SIGSTOP; returns once no thread of it runs, which a busy machine can take a while for."""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + WAIT_S
    while any(
        psutil.Process(thread.id).status() != psutil.STATUS_STOPPED
        for thread in psutil.Process(pid).threads()
    ):
        assert time.monotonic() < deadline_s, f"process {pid} still runs"
        time.sleep(0.01)
