"""Machines that leave with notice, vanish and come back, as real nodes of a real cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.daemon_site import Daemon

pytestmark = pytest.mark.slow


def home_of(status: dict[str, Any], worker: str) -> str | None:
    devices = {w["worker"]: w["device"] for w in status["workers"]}
    device = devices[f"tiny.{worker}"]
    return None if device is None else str(device).partition("/")[0]


def on(*nodes: str) -> Callable[[dict[str, Any]], bool]:
    """All that has a device is on these, and a version is made there."""

    def condition(status: dict[str, Any]) -> bool:
        devices = [w["device"] for w in status["workers"] if w["device"] is not None]
        return all(device.partition("/")[0] in nodes for device in devices)

    return condition


def conserved(status: dict[str, Any]) -> bool:
    groups = status["groups"]
    return bool(groups["admitted"] == sum(n for fate, n in groups.items() if fate != "admitted"))


def test_machines_come_and_go_and_a_pipeline_goes_on(daemon: Daemon, tmp_path: Path) -> None:
    daemon.ok("up", "--detach", "--devices", "none")
    nodes = {name: daemon.join(name) for name in ("a", "b")}
    daemon.ok("submit", str(daemon.pipeline), "--set", "trainer.num_steps=1000")
    before = daemon.until(lambda s: s["version"] >= 2)
    home, other = ("a", "b") if home_of(before, "trainer0") == "a" else ("b", "a")

    nodes[home].terminate()  # as a machine that is taken away, with notice
    assert nodes[home].wait(25) == 0
    told = daemon.status()
    assert on(other)(told)
    after = daemon.until(lambda s: s["version"] >= before["version"] + 3)
    assert after["num_tokens_again"] == 0
    assert conserved(after)

    nodes[home] = daemon.join(home)  # the same machine is back
    nodes["c"] = daemon.join("c")
    os.kill(nodes[other].pid, signal.SIGKILL)  # and the other one loses its power
    nodes[other].wait()
    after = daemon.until(on(home, "c"))
    after = daemon.until(lambda s: s["version"] >= after["version"] + 3)
    assert conserved(after)
    for process in nodes.values():
        process.terminate()
        process.wait(30)
    daemon.ok("cancel", "tiny")


def test_a_second_node_of_one_name_or_folder_is_refused(daemon: Daemon) -> None:
    daemon.ok("up", "--detach", "--devices", "none")
    first = daemon.join("a")
    log = daemon.folder / "logs" / "node-a.log"
    while "ready" not in log.read_text():
        assert first.poll() is None
    second = daemon.join("a")
    assert second.wait(30) == 2
    assert "another node works in" in log.read_text()
    first.terminate()
    assert first.wait(25) == 0
