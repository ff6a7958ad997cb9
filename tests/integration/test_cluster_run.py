"""Services started by hand on a cluster of three NATS servers, over TLS; the leading server dies."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.bus.client import connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.cli.credentials import make
from tests.bus.clusters import Cluster
from tests.integration.live_run import GROUPS_PER_BATCH, PIPELINE, conserved, run_program

pytestmark = pytest.mark.slow

NUM_STEPS = 5
WAIT_S = 150.0


class Services:
    """A scheduler and a node as somebody starts them, and their user."""

    def __init__(self, folder: Path, url: str, group: Path) -> None:
        self._folder = folder
        self._known_by = ("--url", url, "--credentials", str(group))
        self._processes = [
            self._start("scheduler", "--state-dir", str(folder / "scheduler")),
            self._start(
                "node",
                *("--state-dir", str(folder / "node"), "--runs-folder", str(folder / "runs")),
                *("--devices", "cpu"),
            ),
        ]

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", f"services.{name}", *self._known_by, *arguments]
        with (self._folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def jigsaw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return run_program("jigsawrl.cli.main", *arguments, *self._known_by)

    def until(self, version: int) -> dict[str, Any]:
        """The status once the pipeline has that version; a scheduler that is away is waited for."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            done = self.jigsaw("status", "tiny", "--json")
            status: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
            if status.get("version", 0) >= version:
                return status
            assert status.get("state") != "failed", status
            assert time.monotonic() < deadline_s, f"{status} {done.stderr} {self.story()}"
            time.sleep(0.3)

    def story(self) -> str:
        logs = [*self._folder.glob("*.log"), *self._folder.glob("node/logs/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-1500:]}" for path in logs)

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.terminate()
            process.wait(15)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    make(tmp_path / "credentials", group="red")
    (tmp_path / "servers").mkdir()
    with Cluster(tmp_path / "servers", tmp_path / "credentials") as cluster:
        yield cluster


@pytest.fixture
def services(cluster: Cluster, tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path, cluster.url, tmp_path / "credentials" / "red")
    yield services
    services.stop()


async def leader_of(url: str, stream: str, group: Path) -> str:
    """The name of the server that leads a stream, and that it has copies."""
    bus = await connect(url, name="test", credentials=read_credentials(group, "scheduler"))
    info = await bus.connection.call("look", lambda js: js.stream_info(stream))
    await bus.close()
    assert info.config.num_replicas == 3
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


def test_a_pipeline_outlives_the_nats_server_that_leads(
    cluster: Cluster, services: Services, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(PIPELINE)
    submitted = services.jigsaw("submit", str(path), "--set", f"trainer.num_steps={NUM_STEPS}")
    assert submitted.returncode == 0, submitted.stderr
    services.until(2)
    group = tmp_path / "credentials" / "red"
    dead = asyncio.run(leader_of(cluster.url, "JIG_EVENTS", group))
    cluster.kill(dead)
    services.until(NUM_STEPS - 1)
    cluster.start(dead)
    status = services.until(NUM_STEPS)
    deadline_s = time.monotonic() + WAIT_S
    while status["state"] != "finished":
        assert time.monotonic() < deadline_s, status
        status = services.until(NUM_STEPS)
    assert status["groups"]["trained"] == NUM_STEPS * GROUPS_PER_BATCH
    assert conserved(status["groups"])
    assert conserved(status["sequences"])
