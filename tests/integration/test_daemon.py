"""A daemon as its user meets it: `jigsaw up`, pipelines that come and go, `jigsaw down`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.live_run import PIPELINE

pytestmark = pytest.mark.slow

WAIT_S = 120.0


class Daemon:
    """The commands of one daemon's user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "daemon"
        self.pipeline = folder / "tiny.toml"
        self.pipeline.write_text(PIPELINE)

    def jigsaw(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "jigsawrl.cli.main", *arguments],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"JIGSAW_FOLDER": str(self.folder), "OMP_NUM_THREADS": "1"},
            timeout=WAIT_S,
            check=False,
        )

    def ok(self, *arguments: str) -> str:
        done = self.jigsaw(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def refused(self, *arguments: str) -> str:
        done = self.jigsaw(*arguments)
        assert done.returncode in (1, 2), done
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def status(self, pipeline: str = "tiny") -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.ok("status", pipeline, "--json"))
        return told

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while not condition(status := self.status()):
            assert time.monotonic() < deadline_s, status
            time.sleep(0.3)
        return status

    @property
    def pid(self) -> int:
        found: int = json.loads((self.folder / "daemon.json").read_text())["pid"]
        return found

    def processes(self) -> list[psutil.Process]:
        """All that mention its folder."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder) in " ".join(process.info["cmdline"] or ()):
                found.append(process)
        return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    try:
        yield daemon
    finally:
        daemon.jigsaw("down")
        for process in daemon.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def test_pipelines_come_and_go_and_a_paused_one_does_nothing(daemon: Daemon) -> None:
    assert "no daemon is up" in daemon.refused("status")
    daemon.ok("up", "--detach", "--devices", "cpu")
    assert "no pipelines" in daemon.ok("status")
    assert "up in" in daemon.refused("up", "--detach")
    assert "works in" in daemon.refused("up")
    daemon.ok("submit", str(daemon.pipeline), "--set", "trainer.num_steps=1000")
    assert "already" in daemon.refused("submit", str(daemon.pipeline))
    daemon.until(lambda s: s["version"] >= 2)
    daemon.ok("pause", "tiny")
    paused = daemon.until(lambda s: all(w["num_held"] == 0 for w in s["workers"]))
    time.sleep(2)
    assert daemon.status()["version"] - paused["version"] in (0, 1)
    assert daemon.status()["waiting_for"] == ["its user: jigsaw resume tiny"]
    daemon.ok("resume", "tiny")
    daemon.until(lambda s: s["version"] >= paused["version"] + 3)
    daemon.ok("cancel", "tiny")
    assert "has failed already" in daemon.refused("cancel", "tiny")
    assert "there is no pipeline other" in daemon.refused("pause", "other")
    daemon.ok("submit", str(daemon.pipeline), "--wait", "--set", 'name="next"')
    status = daemon.status("next")
    assert (status["state"], status["version"]) == ("finished", 3)
    assert "warmed up" in daemon.ok("logs", "next.trainer0")
    daemon.ok("down")
    assert not daemon.processes()


def test_a_daemon_that_was_stopped_or_killed_goes_on_with_its_pipelines(daemon: Daemon) -> None:
    daemon.ok("up", "--detach", "--devices", "cpu")
    daemon.ok("submit", str(daemon.pipeline), "--set", "trainer.num_steps=1000")
    before = daemon.until(lambda s: s["version"] >= 2)
    daemon.ok("down")
    daemon.ok("up", "--detach", "--devices", "cpu")
    before = daemon.until(lambda s: s["version"] > before["version"])
    os.kill(daemon.pid, signal.SIGKILL)
    assert "no daemon is up" in daemon.refused("status")
    daemon.ok("up", "--detach", "--devices", "cpu")
    after = daemon.until(lambda s: s["version"] > before["version"])
    groups = after["groups"]
    assert groups["admitted"] == sum(n for fate, n in groups.items() if fate != "admitted")
