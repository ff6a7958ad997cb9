"""The list of process groups that this node started, on disk, so that the next node on the same
state folder kills what a killed one left behind. A process is known by (pid, start time): a pid that
the system has given to another process since is left alone."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import msgspec
import psutil


class ProcessGroup(msgspec.Struct, frozen=True):
    """One tenant's process group, led by the tenant."""

    pid: int
    created_s: float


class Leftovers:
    """The file of running process groups."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._groups: dict[int, ProcessGroup] = {}

    def kill_all(self) -> int:
        """Kill what an earlier node left behind; how many groups that were."""
        if not self._path.exists():
            return 0
        groups = msgspec.json.decode(self._path.read_bytes(), type=list[ProcessGroup])
        num_killed = sum(_kill(group) for group in groups)
        self._path.unlink()
        return num_killed

    def add(self, pid: int) -> None:
        """Remember a group that was just started."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._groups[pid] = ProcessGroup(pid=pid, created_s=psutil.Process(pid).create_time())
        self._write()

    def remove(self, pid: int) -> None:
        """Forget a group that has ended."""
        self._groups.pop(pid, None)
        self._write()

    def _write(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(msgspec.json.encode(list(self._groups.values())))
        temporary.replace(self._path)


def _kill(group: ProcessGroup) -> bool:
    try:
        if abs(psutil.Process(group.pid).create_time() - group.created_s) > 0.1:
            return False
        os.killpg(group.pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return False
    return True
