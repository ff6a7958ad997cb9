"""The folder of a daemon on this machine: where it keeps everything, and how others find it.

``DIR/daemon.json`` says where a daemon that is up listens; the lock on ``DIR/lock`` says whether it
lives, since it ends with the process.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec

from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.file_systems import MOUNTS, network_file_system
from jigsawrl.cli.run_folder import is_locked, lock

DAEMON_FILE = "daemon.json"


class Daemon(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A daemon that is up: ``daemon.json``."""

    url: str
    pid: int
    host: str = ""
    """Of the machine that it runs on."""
    credentials: str | None = None
    """The folder of its group's, where its server takes no others."""


def default_folder() -> Path:
    """``$JIGSAW_FOLDER``, else ``jigsaw`` where this user's programs keep their state."""
    given = os.environ.get("JIGSAW_FOLDER")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "jigsaw"


def occupy(folder: Path, *, mounts: Path = MOUNTS) -> int:
    """Make the folder and lock it; the descriptor, with which the lock ends. Raises `CommandError`
    where it can't be made, or a daemon has it, or may have it on another machine."""
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"{folder} can't be made: {error.strerror}; choose another --folder",
            status=EXIT_BAD_INPUT,
        ) from None
    held = lock(folder, holder="daemon", remedy=f"jigsaw down --folder {folder}")
    try:
        _check_other_machines(folder, mounts)
    except CommandError:
        os.close(held)
        raise
    return held


def _check_other_machines(folder: Path, mounts: Path) -> None:
    """Two servers on one store destroy it, and the lock may say nothing of another machine's. A daemon
    that ended in order has withdrawn."""
    kind = network_file_system(folder, mounts=mounts)
    daemon = None if kind is None else last_announced(folder)
    if daemon is not None and daemon.host not in ("", socket.gethostname()):
        raise CommandError(
            f"a daemon was up in {folder} on {daemon.host}, and on {kind} its lock may not be seen"
            f" here: run jigsaw down there, or delete {folder / DAEMON_FILE} if it is dead",
            status=EXIT_BAD_INPUT,
        )


def announce(folder: Path, daemon: Daemon) -> None:
    """The daemon is up."""
    path = folder / DAEMON_FILE
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(daemon) + b"\n")
    part.replace(path)


def withdraw(folder: Path) -> None:
    """It no longer is."""
    with contextlib.suppress(FileNotFoundError):
        (folder / DAEMON_FILE).unlink()


def find(folder: Path) -> Daemon:
    """The daemon that is up there; raises `CommandError` where none is."""
    daemon = last_announced(folder)
    if daemon is None or not is_occupied(folder):
        raise CommandError(
            f"no daemon is up in {folder}: start one with jigsaw up, or name one by --folder or --url",
            status=EXIT_FAILED,
        )
    return daemon


def last_announced(folder: Path) -> Daemon | None:
    """The daemon that said so last, dead or alive; raises `CommandError` where that can't be read."""
    try:
        return msgspec.json.decode((folder / DAEMON_FILE).read_bytes(), type=Daemon)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(
            f"{folder / DAEMON_FILE} can't be read: {error}", status=EXIT_FAILED
        ) from None


def is_occupied(folder: Path) -> bool:
    """A living process has its lock; raises `CommandError` where that can't be seen."""
    return is_locked(folder)
