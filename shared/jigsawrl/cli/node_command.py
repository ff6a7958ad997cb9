"""`jigsaw node`: this machine joins a cluster, until it is told to stop.

Called by `cluster_commands`. The command becomes the node's program, so that a signal, a container or a
batch system's process list mean the node itself.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path

from jigsawrl.cli.cluster import Address
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.cli.programs import require_programs
from jigsawrl.cli.run_folder import lock

NOTICE_S = 20.0
"""What batch systems and container engines mostly leave between SIGTERM and SIGKILL, 30 s, less the
node's own stop."""


def default_name() -> str:
    """The host's name, as far as it may be part of a subject."""
    return re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname().partition(".")[0]).strip("-")


def join(
    address: Address,
    folder: Path,
    *,
    name: str,
    runs_folder: Path,
    devices: str | None,
    notice_s: float,
    metrics: str | None,
) -> int:
    """Become the node `name` with its state in `folder`; never returns where that works."""
    require_programs("services")
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(
            f"{folder} can't be made: {error.strerror}; choose another --folder",
            status=EXIT_BAD_INPUT,
        ) from None
    held = lock(folder, holder="node", remedy="give each node a --name of its own")
    os.set_inheritable(held, True)  # it stays with the program
    runs = runs_folder.resolve()
    command = [sys.executable, "-m", "services.node", "--url", address.url, "--node", name]
    command += ["--state-dir", str(folder), "--runs-folder", str(runs), "--notice", str(notice_s)]
    if devices is not None:
        command += ["--devices", devices]
    if metrics is not None:
        command += ["--metrics", metrics]
    if address.credentials is not None:
        command += ["--credentials", str(address.credentials.resolve())]
    os.execv(sys.executable, command)
