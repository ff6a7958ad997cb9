"""A daemon as its user meets it: `jigsaw up`, pipelines that come and go, `jigsaw down`."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.integration.daemon_site import Daemon

pytestmark = pytest.mark.slow


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
