"""A daemon's folder on this machine: can it be written, is there room, who works in it.

Knows processes by their command lines, which name the folder: so it finds those that a dead daemon left
behind, and two that share one store.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from jigsawrl.bus.server import needed_store_bytes
from jigsawrl.cli.checks.finding import Finding, failed, ok, warning
from jigsawrl.cli.daemon_folder import Daemon, is_occupied, last_announced
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.file_systems import network_file_system

SINGLE = {
    "nats-server": ("-c", "nats/nats-server.conf"),
    "scheduler": ("--state-dir", "scheduler"),
    "node": ("--state-dir", "node"),
}
"""Of each program that a folder has once: an option of its command line, and the path under the folder
that follows."""


class Running(msgspec.Struct, frozen=True):
    """One process that works in a folder."""

    pid: int
    program: str
    """A key of `SINGLE`, or ``tenant``."""


class _Group(msgspec.Struct, frozen=True):
    """One tenant's process group, as a node remembers it: a pid may be another's by now."""

    pid: int
    created_s: float


def check_folder(folder: Path) -> Iterator[Finding]:
    """All of it; the folder need not exist yet."""
    existing = _existing(folder)
    writable = _check_writable(folder, existing)
    yield writable
    yield _check_free(folder, shutil.disk_usage(existing).free)
    kind = network_file_system(existing)
    if kind is not None:
        yield warning(
            "folder",
            f"{folder} lies on {kind}: its lock may not be seen by other machines, and two daemons on"
            " one store destroy it",
            remedy="give a --folder on a local disk, one for each machine",
        )
    if writable.state == "failed":
        return  # nor can its lock be looked at
    try:
        is_up = is_occupied(folder)
        yield _check_daemon(folder, is_up=is_up)
    except (OSError, CommandError) as error:
        yield failed("daemon", str(error), remedy=f"mend or remove what lies in {folder}")
        return
    yield from _check_processes(folder, is_up=is_up)


def _existing(folder: Path) -> Path:
    """It, or the nearest folder above it that exists."""
    folder = folder.absolute()
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def _check_writable(folder: Path, existing: Path) -> Finding:
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return failed(
            "folder",
            f"{existing} can't be written: {error.strerror}",
            remedy="mend its permissions, or choose another --folder",
        )
    return ok("folder", f"{folder} can be written" + ("" if existing == folder else ", once made"))


def _check_free(folder: Path, free_bytes: int) -> Finding:
    needed_bytes = needed_store_bytes()
    found = f"{free_bytes / 2**30:.1f} GiB free on the disk of {folder}"
    if free_bytes < needed_bytes:
        return failed(
            "disk",
            f"{found}; nats-server starts from {needed_bytes / 2**30:.1f} GiB on",
            remedy="free some space, or choose another --folder",
        )
    return ok("disk", found)


def _check_daemon(folder: Path, *, is_up: bool) -> Finding:
    if not is_up:
        return ok("daemon", f"none is up in {folder} (jigsaw up starts one)")
    daemon = last_announced(folder)
    if daemon is None:
        return warning(
            "daemon",
            f"a process holds the lock of {folder}, and has not said that it is up",
            remedy=f"wait a moment; then see {folder / 'logs'}",
        )
    return _of_host(folder, daemon)


def _of_host(folder: Path, daemon: Daemon) -> Finding:
    if daemon.host not in ("", socket.gethostname()):
        return warning(
            "daemon",
            f"the one in {folder} runs on {daemon.host} (process {daemon.pid})",
            remedy=f"ask about it there, or by --url {daemon.url} where that can be reached",
        )
    return ok("daemon", f"up in {folder} at {daemon.url} (process {daemon.pid})")


def _check_processes(folder: Path, *, is_up: bool) -> Iterator[Finding]:
    try:
        running = processes_of(folder)
    except ImportError:
        yield warning(
            "processes",
            "psutil is missing: leftovers can't be looked for",
            remedy="pip install 'jigsawrl[services]'",
        )
        return
    twice = [
        f"{len(pids)} of {program} ({_listed(pids)})"
        for program in SINGLE
        if len(pids := [one.pid for one in running if one.program == program]) > 1
    ]
    if twice:
        yield failed(
            "processes",
            f"two daemons share the store of {folder}: {'; '.join(twice)}",
            remedy="end all of them with kill, at once: the store may be damaged; then jigsaw up",
        )
    elif running and not is_up:
        yield warning(
            "processes",
            f"{len(running)} processes of a dead daemon still run: {_listed(p.pid for p in running)}",
            remedy="end them with kill; the next jigsaw up in the folder ends tenants by itself",
        )
    else:
        yield ok("processes", f"{len(running)} work in {folder}, none twice and none left behind")


def processes_of(folder: Path) -> Sequence[Running]:
    """That run now; raises ImportError without psutil."""
    import psutil

    folder = folder.resolve()
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or ()
        program = _program(command, folder)
        if program is not None and process.pid != os.getpid():
            found.append(Running(process.pid, program))
    known = {running.pid for running in found}
    tenants = (Running(pid, "tenant") for pid in _tenants(folder) if pid not in known)
    return [*found, *tenants]


def _program(command: Sequence[str], folder: Path) -> str | None:
    options = {*itertools.pairwise(command)}
    for program, (option, path) in SINGLE.items():
        if (option, str(folder / path)) in options:
            return program
    return None


def _tenants(folder: Path) -> Iterator[int]:
    """Of the list that a node keeps, those that still are the processes that it started."""
    import psutil

    try:
        path = folder / "node" / "processes.json"
        groups = msgspec.json.decode(path.read_bytes(), type=list[_Group])
    except (OSError, msgspec.DecodeError):
        return
    for group in groups:
        with contextlib.suppress(psutil.Error):
            if abs(psutil.Process(group.pid).create_time() - group.created_s) < 0.1:
                yield group.pid


def _listed(pids: Iterable[int]) -> str:
    return "process " + ", ".join(map(str, pids))
