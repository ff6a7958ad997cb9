"""A cluster in containers (`make test-compose`; Debian, root): what docker-compose.yml promises."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.live_run import GROUPS_PER_BATCH, PIPELINE, conserved

pytestmark = [pytest.mark.compose, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NUM_STEPS = 60
WAIT_S = 240.0


class Compose:
    """One project's containers and volumes, and its user."""

    def __init__(self, folder: Path) -> None:
        self._command = (
            ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        )
        self._project = f"jigsaw-test-{os.getpid()}"
        self._folder = folder
        (folder / "tiny.toml").write_text(PIPELINE)
        folder.chmod(0o755)  # the image's user is not this one

    def started(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*self._command, "--project-name", self._project, *arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str) -> str:
        process = self.started(*arguments)
        out, err = process.communicate(timeout=WAIT_S * 3)
        assert process.returncode == 0, f"{arguments}: {out[-2000:]}{err[-2000:]}"
        return out

    def jigsaw(self, *arguments: str) -> tuple[str, ...]:
        """What runs a command of ours in a container of its own."""
        return ("run", "--rm", "-T", "-v", f"{self._folder}:/mine:ro", "jigsaw", *arguments)

    def status(self) -> dict[str, Any]:
        """Of the pipeline; empty while there is none."""
        asking = ("exec", "-T", "head", "jigsaw", "status", "tiny", "--json", "--folder", "/state")
        process = self.started(*asking)
        out, _ = process.communicate(timeout=WAIT_S)
        return dict(json.loads(out)) if process.returncode == 0 else {}

    def until(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            status = self.status()
            if status and condition(status):
                return status
            assert status.get("state") != "failed", status
            assert time.monotonic() < deadline_s, f"{status} {self.call('logs', '--tail', '40')}"


@pytest.fixture
def compose(tmp_path: Path) -> Iterator[Compose]:
    compose = Compose(tmp_path)
    try:
        yield compose
    finally:
        compose.call("--profile", "environment", "down", "--volumes", "--timeout", "5")


def device_of(status: dict[str, Any], worker: str) -> str | None:
    found = [w["device"] for w in status["workers"] if w["worker"] == worker]
    return None if not found or found[0] is None else str(found[0])


def test_two_nodes_train_to_the_end_though_one_is_killed_and_a_third_container_helps(
    compose: Compose,
) -> None:
    compose.call("up", "-d", "--build", "--scale", "node=2")
    submitted_s = time.monotonic()
    steps = ("--set", f"trainer.num_steps={NUM_STEPS}", "--set", "rollout.num_workers=2")
    waiting = compose.started(*compose.jigsaw("submit", "/mine/tiny.toml", *steps, "--wait"))
    compose.until(lambda status: status["version"] >= 1)
    print(f"submit to the first step: {time.monotonic() - submitted_s:.1f} s")
    helper = ("run", "-d", "--rm", "environment", "--pipeline", "tiny")
    compose.call(*helper, "--worker", "tiny.environment-outside")
    before = compose.until(lambda status: device_of(status, "tiny.environment-outside") is None)
    rollout_homes = {device_of(before, f"tiny.rollout{i}") for i in range(2)}
    assert len({str(home).partition("/")[0] for home in rollout_homes}) == 2, before["workers"]

    killed_s = time.monotonic()
    trainer = str(device_of(before, "tiny.trainer0"))
    subprocess.run(["docker", "kill", trainer.partition("/")[0]], check=True, capture_output=True)
    compose.until(lambda status: device_of(status, "tiny.trainer0") not in (trainer, None))
    compose.until(lambda status: status["version"] > before["version"] + 1)
    print(f"node killed to two steps later: {time.monotonic() - killed_s:.1f} s")

    out, err = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 0, err + out
    status = compose.status()
    assert (status["state"], status["version"]) == ("finished", NUM_STEPS)
    assert status["groups"]["trained"] == NUM_STEPS * GROUPS_PER_BATCH
    assert conserved(status["groups"])
    assert conserved(status["sequences"])
    lines = compose.call(
        *("run", "--rm", "-T", "--no-deps", "--entrypoint", "cat"),
        *("node", "/runs/tiny/metrics.jsonl"),
    )
    versions = [json.loads(line)["version"] for line in lines.splitlines()]
    assert versions == list(range(1, NUM_STEPS + 1)), "each step once"
