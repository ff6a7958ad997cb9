"""A cluster on hosts of their own: three NATS servers, a scheduler, two nodes, and their user.

All as `docs/security.md` says: credentials by `jigsaw credentials --cluster`, each server from its
own folder and file, scheduler and nodes by hand with all addresses.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from nats.js.api import ClusterInfo

from jigsawrl.bus.client import connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.bus.server import find_server
from jigsawrl.cli.credentials import make
from tests.integration.live_run import QUICK
from tests.network.hosts import Network

SERVERS = ("nats-a", "nats-b", "nats-c")
SCHEDULER = "scheduler"
NODES = ("node-a", "node-b")
HOSTS = (*SERVERS, SCHEDULER, *NODES)

WAIT_S = 300.0
"""On a machine that others load, too."""
POLL_S = 0.5
COMMAND_TIMEOUT_S = 60.0

Status = dict[str, Any]


class Site:
    """One cluster of one test."""

    def __init__(self, folder: Path, network: Network) -> None:
        self.folder = folder
        self.runs = folder / "runs"
        self.state = folder / "scheduler"
        self.network = network
        self._credentials = folder / "credentials"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        addresses = [network.addresses[name] for name in SERVERS]
        make(self._credentials, group="red", cluster=addresses)
        self._group = self._credentials / "red"
        self._url = ",".join(f"tls://{address}:4222" for address in addresses)
        self._known_by = ("--url", self._url, "--credentials", str(self._group))

    def start(self) -> None:
        """All of it, and nothing submitted yet."""
        for name in SERVERS:
            self.start_server(name)
        self.scheduler = self._start(SCHEDULER, "scheduler", "--state-dir", str(self.state))
        for name in NODES:
            state = ("--state-dir", str(self.folder / name), "--runs-folder", str(self.runs))
            self._start(name, "node", "--node", name, "--devices", "cpu", *state)

    def start_server(self, name: str) -> None:
        """A NATS server, with what it had stored."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        config = f"nats-server-{self.network.addresses[name]}.conf"
        for file in ("server.pem", "server.key", "ca.pem", config):
            shutil.copy(self._credentials / file, folder)
        command = (str(find_server()), "-c", config)
        log = self.folder / f"{name}.log"
        self._servers[name] = self.network.start(name, *command, log=log, folder=folder)

    def kill_server(self, name: str) -> float:
        """A crash; when it was."""
        self._servers[name].kill()
        killed_s = time.time()
        self._servers[name].wait()
        return killed_s

    def _start(self, host: str, service: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-m", f"services.{service}", *self._known_by, *arguments)
        return self.network.start(host, *command, log=self.folder / f"{host}.log")

    def submit(self, *settings: str) -> None:
        """The tiny pipeline, as a user does at the scheduler's host."""
        path = self.folder / "tiny.toml"
        path.write_text(QUICK)
        options = [part for setting in settings for part in ("--set", setting)]
        done = self._jigsaw("submit", str(path), *options)
        assert done.returncode == 0, f"{done.stderr}\n{self.story()}"

    def status(self) -> Status | None:
        """None while nobody answers."""
        done = self._jigsaw("status", "tiny", "--json")
        return None if done.returncode else dict(json.loads(done.stdout))

    def until(self, condition: Callable[[Status], bool], *, within_s: float = WAIT_S) -> Status:
        """The status once something is true of it; a scheduler that is away is waited for."""
        deadline_s = time.monotonic() + within_s
        while True:
            status = self.status()
            if status is not None and condition(status):
                return status
            assert status is None or status["state"] != "failed", f"{status}\n{self.story()}"
            assert time.monotonic() < deadline_s, f"{status}\n{self.story()}"
            time.sleep(POLL_S)

    def end(self) -> None:
        """The scheduler's orderly stop, which writes the rest of the events."""
        self.scheduler.terminate()
        self.scheduler.wait(30)

    def tenants_of(self, host: str) -> list[int]:
        """Processes of tenants that run on a host."""
        found = []
        for pid in self.network.processes(host):
            try:
                command = psutil.Process(pid).cmdline()
            except psutil.Error:
                continue
            if "--worker" in command:
                found.append(pid)
        return found

    def shape_of(self, stream: str) -> ClusterInfo:
        """Who leads a stream and who follows."""
        return self.network.call(SCHEDULER, lambda: asyncio.run(self._shape_of(stream)))

    def leader_of(self, stream: str) -> str:
        """The host that leads a stream, once all others have what it has."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            shape = self.shape_of(stream)
            followers = shape.replicas or []
            if shape.leader and len(followers) == 2 and all(one.current for one in followers):
                return self._host_at(shape.leader)
            assert time.monotonic() < deadline_s, f"{shape}\n{self.story()}"
            time.sleep(POLL_S)

    async def _shape_of(self, stream: str) -> ClusterInfo:
        credentials = read_credentials(self._group, "scheduler")
        bus = await connect(self._url, name="test", timeout_s=30, credentials=credentials)
        try:
            info = await bus.connection.call("look", lambda js: js.stream_info(stream))
        finally:
            await bus.close()
        assert info.config.num_replicas == 3
        assert info.cluster is not None
        return info.cluster

    def _host_at(self, address: str) -> str:
        return next(name for name, at in self.network.addresses.items() if at == address)

    def _jigsaw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        program = (sys.executable, "-m", "jigsawrl.cli.main")
        known_by = (*self._known_by[:2], "--credentials", str(self._group / "client.pem"))
        return self.network.run(
            SCHEDULER, *program, *arguments, *known_by, timeout_s=COMMAND_TIMEOUT_S
        )

    def story(self) -> str:
        """Everything that helps to understand a failure."""
        logs: Sequence[Path] = [*self.folder.glob("*.log"), *self.folder.glob("*/logs/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in logs)
