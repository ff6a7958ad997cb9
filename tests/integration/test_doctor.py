"""`jigsaw doctor` on a daemon that is up, and on what is left of one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from jigsawrl.bus.client import connect
from jigsawrl.contract.events import NodeStarted
from jigsawrl.contract.message import Worker
from tests.integration.daemon_site import Daemon

pytestmark = pytest.mark.slow


def findings(daemon: Daemon, *, status: int) -> dict[str, list[dict[str, Any]]]:
    done = daemon.jigsaw("doctor", "--json")
    assert done.returncode == status, done
    found: dict[str, list[dict[str, Any]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return found


async def introduce(url: str) -> None:
    bus = await connect(url, name="test")
    node = Worker(id="stranger", boot="b")
    await bus.publish_event(NodeStarted(id="stranger", schema=3, node=node, devices=()))
    await bus.close()


def test_a_daemon_that_is_well_a_stranger_and_what_is_left_after_a_kill(daemon: Daemon) -> None:
    daemon.ok("up", "--detach", "--devices", "cpu")
    found = findings(daemon, status=0)
    for check in ("daemon", "processes", "nats", "max_payload", "jetstream", "scheduler", "clock"):
        assert [finding["state"] for finding in found[check]] == ["ok"], found[check]
    assert "policy jigsaw" in found["scheduler"][0]["found"]
    (node,) = found["nodes"]
    assert node["found"].startswith("node0: up")
    url = json.loads((daemon.folder / "daemon.json").read_text())["url"]
    asyncio.run(introduce(url))
    _, stranger = findings(daemon, status=1)["nodes"]
    assert stranger["found"].startswith("stranger gets no work: stranger speaks schema 3")
    assert "node refused: stranger" in daemon.ok("status")
    os.kill(daemon.pid, signal.SIGKILL)
    assert "nats" not in findings(daemon, status=0)
