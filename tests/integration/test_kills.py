"""Every process of a run is killed, one after the other, at random moments, or frozen until it is taken
for dead: the run completes by itself, nothing is lost or trained twice, and where the engine is
deterministic no bit changes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from tests.integration.live_run import ROLES, LiveRun, assert_each_has_one_fate, conserved
from tests.integration.test_exactness import NUM_STEPS, fingerprint, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FROZEN_S = 20.0
KILLED = ("nats-server", *ROLES)
STEP_S = 0.3
"""About one step's time on two cores: a kill comes at any phase of the next one."""

ASYNC = ("mode.type=async", "mode.max_staleness=2", "algorithm.correction.type=truncate")
FAST = "rollout.engine.deterministic=false"
EVALUATED = ("evaluation.enabled=true", "evaluation.every=1")


def kill(live: LiveRun, name: str) -> None:
    """SIGKILL, as soon as there is such a process."""
    if name != "nats-server":
        live.kill(name)
        return
    servers: list[psutil.Process] = []
    live.until(
        lambda: servers.extend(p for p in live.process.children() if p.name() == name) or servers
    )
    servers[0].kill()


def kill_all_in_turn(live: LiveRun, random: Random, killed: Sequence[str] = KILLED) -> list[str]:
    """Each once, in random order; each time after the run has made a step since the last, and a random
    time of the next."""
    order = random.sample(killed, len(killed))
    done = 1
    for name in order:
        live.until(lambda wanted=done: live.num_steps_done() >= wanted)  # type: ignore[misc]
        time.sleep(random.uniform(0, STEP_S))
        kill(live, name)
        done = live.num_steps_done() + 1
    return order


def assert_ended_well(live: LiveRun, story: object) -> None:
    assert live.wait(300) == 0, f"{story}\n{live.story()}"
    tiny = live.tiny()
    assert tiny["version"] == NUM_STEPS
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])
    assert live.summary()["dead_letters"] == 0
    lines = (live.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert_each_has_one_fate(live, num_steps=NUM_STEPS)


def test_in_sync_the_weights_are_those_of_an_undisturbed_run(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with start(tmp_path) as live:
        # Evaluation is off where bits are compared.
        killed = [name for name in KILLED if name != "evaluation"]
        order = kill_all_in_turn(live, Random(1), killed)
        assert_ended_well(live, f"killed {order}")
        assert fingerprint(live) == undisturbed, order
        assert "scheduler ended with signal SIGKILL; starting it again" in live.stdout


@contextmanager
def standby(live: LiveRun, folder: Path) -> Iterator[Path]:
    """A second scheduler, which comes too late to lead; the path of its log."""
    live.until(lambda: live.num_steps_done() >= 1)
    command = [sys.executable, "-m", "services.scheduler", "--url", live.url()]
    log = folder / "standby.log"
    with log.open("wb") as file:
        process = subprocess.Popen([*command, "--state-dir", str(folder / "standby")], stderr=file)
    try:
        yield log
    finally:
        process.kill()
        process.wait()


def test_a_scheduler_that_is_frozen_while_a_standby_leads_changes_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with start(tmp_path) as live, standby(live, tmp_path) as standby_log:
        live.until(lambda: live.num_steps_done() >= 2)
        frozen = live.service("scheduler")
        frozen.send_signal(signal.SIGSTOP)
        start_s, done = time.monotonic(), live.num_steps_done()
        live.until(lambda: live.num_steps_done() >= done + 3)
        assert "scheduler: leads " in standby_log.read_text()
        trainer = live.service("trainer")
        trainer.send_signal(signal.SIGSTOP)  # or the run ends before the leader thaws
        time.sleep(max(0.0, start_s + FROZEN_S - time.monotonic()))
        frozen.send_signal(signal.SIGCONT)
        log = live.run_folder / "logs" / "scheduler.log"
        live.until(lambda: "was deposed and stands by" in log.read_text())
        trainer.send_signal(signal.SIGCONT)
        assert_ended_well(live, "frozen scheduler")
        assert fingerprint(live) == undisturbed


def test_a_rollout_worker_that_is_frozen_beyond_its_lease_changes_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with start(tmp_path, "rollout.num_workers=2") as live:
        live.until(lambda: live.num_steps_done() >= 2)
        frozen = live.service("rollout")
        frozen.send_signal(signal.SIGSTOP)
        done = live.num_steps_done()
        live.until(lambda: live.num_steps_done() >= done + 2, timeout_s=60)
        frozen.send_signal(signal.SIGCONT)
        assert_ended_well(live, "frozen rollout worker")
        assert fingerprint(live) == undisturbed


def test_in_async_no_group_is_lost_or_trained_twice(tmp_path: Path) -> None:
    with start(tmp_path, *ASYNC, FAST, *EVALUATED) as live:
        order = kill_all_in_turn(live, Random(2))
        assert_ended_well(live, f"killed {order}")
        assert live.tiny()["eval_before"] is not None
        assert live.tiny()["eval_after"] is not None
