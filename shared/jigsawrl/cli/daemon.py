"""`jigsaw up` and `jigsaw down`: nats-server, scheduler and node as one daemon, to which pipelines come
and go.

Called by `main`. The daemon is the supervisor of `jigsaw run` without a run: its folder holds the
store, the scheduler's records and the pipelines' folders (``runs/NAME``), so that the next daemon there
goes on with what this one had.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path

import msgspec

from jigsawrl.cli.daemon_folder import (
    Daemon,
    announce,
    find,
    is_occupied,
    last_announced,
    occupy,
    withdraw,
)
from jigsawrl.cli.disk import watch_disk
from jigsawrl.cli.embedded import Devices, Listening, embedded_system
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.log_files import put_aside
from jigsawrl.cli.metrics_addresses import MetricsAddresses
from jigsawrl.cli.run_folder import PROFILE_FILE
from jigsawrl.cli.supervisor import GaveUpError, tail
from jigsawrl.devices.gpus import find_gpus
from jigsawrl.profile_file import read_profile

UP_TIMEOUT_S = 60.0
"""Until a detached daemon is up, on a busy machine."""

DOWN_TIMEOUT_S = 15.0
"""Until it is gone: three times what a stop takes."""

POLL_S = 0.05


def up(
    folder: Path,
    *,
    policy: str,
    profile: Path | None,
    devices: Devices,
    listening: Listening,
    metrics: MetricsAddresses | None = None,
) -> int:
    """Be the daemon until a signal; the exit status."""
    folder = folder.resolve()
    occupy(folder)  # to the end of the process: `down` promises that it is gone then
    try:
        if profile is not None:
            _adopt(profile, folder, devices=devices)
        serving = _serve(
            folder, policy=policy, devices=devices, listening=listening, metrics=metrics
        )
        return asyncio.run(_until_signal(serving))
    finally:
        withdraw(folder)


def detach(folder: Path, *options: str, timeout_s: float = UP_TIMEOUT_S) -> int:
    """Start the daemon in the background; once it is up; one that takes too long is ended."""
    folder = folder.resolve()
    if is_occupied(folder):
        raise CommandError(f"a daemon is up in {folder} already", status=EXIT_BAD_INPUT)
    os.close(occupy(folder))
    log = folder / "logs" / "daemon.log"
    put_aside(log)
    command = [sys.executable, "-m", "jigsawrl.cli.main", "up", "--folder", str(folder), *options]
    with log.open("ab") as output:
        num_before_bytes = output.tell()  # of earlier daemons: not why this one ended
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(CommandError):
            daemon = find(folder)
            if daemon.pid == process.pid:
                print(f"up: {daemon.url} (folder {folder})")
                return 0
        if process.poll() is not None:
            for line in tail(log, after_bytes=num_before_bytes):
                print(f"  | {line}", file=sys.stderr)
            raise CommandError(f"the daemon ended with status {process.returncode}; see {log}")
        time.sleep(POLL_S)
    _end(process)
    raise CommandError(f"the daemon was not up after {timeout_s:.0f} s, and was ended; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Its children die with it."""
    process.terminate()
    try:
        process.wait(DOWN_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def down(folder: Path) -> int:
    """Stop the daemon; returns once it is gone. What its pipelines have reached stays, and the next
    daemon in the folder goes on with them."""
    folder = folder.resolve()
    daemon = _find_for_down(folder)
    if daemon is None:
        print(f"down: {folder}")
        return 0
    try:
        os.kill(daemon.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    except PermissionError:
        raise CommandError(
            f"the daemon in {folder} (process {daemon.pid}) belongs to another user"
        ) from None
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    while is_occupied(folder):
        if time.monotonic() > deadline_s:
            raise CommandError(
                f"the daemon (process {daemon.pid}) still runs after {DOWN_TIMEOUT_S:.0f} s:"
                f" see {folder / 'logs'}, or end it with kill -9 {daemon.pid}"
            )
        time.sleep(POLL_S)
    print(f"down: {folder}")
    return 0


def _find_for_down(folder: Path) -> Daemon | None:
    """Also one that still starts, which has not said so yet; None for one that was on its way down
    already. Raises `CommandError` where none is up, or one on another machine."""
    deadline_s = time.monotonic() + DOWN_TIMEOUT_S
    waited = False
    while (daemon := last_announced(folder)) is None and is_occupied(folder):
        waited = True
        if time.monotonic() > deadline_s:
            raise CommandError(
                f"a process holds the lock of {folder} and has not said for {DOWN_TIMEOUT_S:.0f} s that"
                f" it is up: see {folder / 'logs'}, or end it by hand"
            )
        time.sleep(POLL_S)
    if daemon is not None and daemon.host not in ("", socket.gethostname()):
        # The process of that number here is somebody else's, and the lock may not be seen from here.
        raise CommandError(
            f"the daemon in {folder} runs on {daemon.host} (process {daemon.pid}):"
            " run jigsaw down there"
        )
    return None if daemon is None and waited else find(folder)


def _adopt(profile: Path, folder: Path, *, devices: Devices) -> None:
    """Keep a copy of a profile of this machine's devices; raises `CommandError` for another's."""
    try:
        gpus = [] if devices == "cpu" else find_gpus(otherwise="give --devices cpu")
        checked = read_profile(profile, device_kind=gpus[0].name if gpus else "cpu")
    except ValueError as error:
        raise CommandError(f"--profile {error}", status=EXIT_BAD_INPUT) from None
    (folder / PROFILE_FILE).write_bytes(msgspec.json.encode(checked) + b"\n")


async def _until_signal(daemon: Coroutine[None, None, int]) -> int:
    """0 after a signal: that is how a daemon ends."""
    serving = asyncio.ensure_future(daemon)
    told = asyncio.Event()

    def on_signal() -> None:
        if not told.is_set():  # a second one must not break off the stop
            told.set()
            serving.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal)
    try:
        return await serving
    except asyncio.CancelledError:
        if not told.is_set():
            raise
        return 0


async def _serve(
    folder: Path,
    *,
    policy: str,
    devices: Devices,
    listening: Listening,
    metrics: MetricsAddresses | None,
) -> int:
    from jigsawrl.observe import log_format  # structlog comes with the programs

    say = _say if log_format() == "text" else _say_as_json
    async with embedded_system(
        folder,
        runs_folder=folder / "runs",
        policy=policy,
        devices=devices,
        listening=listening,
        metrics=metrics,
    ) as system:
        known_by = None if listening.credentials is None else str(listening.credentials)
        announce(
            folder,
            Daemon(
                url=system.url, pid=os.getpid(), host=socket.gethostname(), credentials=known_by
            ),
        )
        say(f"up: {system.url} (folder {folder})")
        if metrics is not None:
            say(metrics.told())
        disk = asyncio.create_task(watch_disk(folder, say, on_room=system.restart_store))
        try:
            await system.supervise(say)
        except GaveUpError as error:
            for line in error.tail:
                print(f"  | {line}", file=sys.stderr)
            print(f"jigsaw up: {error}", file=sys.stderr, flush=True)
        finally:
            withdraw(folder)
            disk.cancel()
            await asyncio.gather(disk, return_exceptions=True)
    return EXIT_FAILED


def _say(text: str) -> None:
    print(text, flush=True)


def _say_as_json(text: str) -> None:
    from jigsawrl.observe import json_line

    print(json_line(service="daemon", event=text), flush=True)
