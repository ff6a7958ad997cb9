"""What Linux tells under /proc of a process: its children, threads, group and identity.

Read directly: the library needs no psutil. `proc` is a parameter so that tests can pass a folder.
"""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def threads(pid: int, *, proc: Path) -> list[int]:
    """Its thread ids; none where it is gone."""
    try:
        return sorted(int(entry.name) for entry in (proc / str(pid) / "task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def children(pid: int, *, proc: Path) -> list[int]:
    """Direct children of all its threads."""
    found: list[int] = []
    for thread in threads(pid, proc=proc):
        try:
            text = (proc / str(pid) / "task" / str(thread) / "children").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found += [int(child) for child in text.split()]
    return found


def family(pid: int, *, proc: Path) -> list[int]:
    """The process and all its descendants."""
    found = [pid]
    for member in found:  # grows while it is walked
        found += [child for child in children(member, proc=proc) if child not in found]
    return found


def start_ticks(pid: int, *, proc: Path) -> int | None:
    """When the process started, in clock ticks after boot; with the pid it names one process for good.
    None where it is gone or a zombie."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks and brackets
    return None if fields[0] in "ZX" else int(fields[19])


def pid_namespace(*, proc: Path) -> int:
    """In which process ids mean what they mean here."""
    return os.stat(proc / "self" / "ns" / "pid").st_ino


def group_path(pid: int | str, *, controller: str | None, proc: Path) -> str:
    """Path of a process's control group in the hierarchy of a v1 controller, or in v2 (None)."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return "/"
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if controller in controllers.split(",") or (controller is None and number == "0"):
            return path
    return "/"
