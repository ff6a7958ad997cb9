"""Every process of a run is killed, one after the other, at random moments: the run completes by
itself, nothing is lost or trained twice, and where the engine is deterministic no bit changes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.integration.live_run import ROLES, LiveRun, conserved
from tests.integration.test_exactness import fingerprint, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 24
KILLED = ("nats-server", *(role for role in ROLES if role != "evaluation"))
"""The tiny pipeline of the exactness tests has no evaluation."""

ASYNC = ("mode.type=async", "mode.max_staleness=2", "algorithm.correction.type=truncate")


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


def kill_all_in_turn(live: LiveRun, random: Random) -> list[str]:
    """Each once, in random order; each time after the run has made a step since the last."""
    order = random.sample(KILLED, len(KILLED))
    done = 1
    for name in order:
        live.until(lambda wanted=done: live.num_steps_done() >= wanted)  # type: ignore[misc]
        kill(live, name)
        done = live.num_steps_done() + 1
    return order


def assert_trained_once(live: LiveRun) -> None:
    """Each group stands in exactly one batch of the history that survived."""
    folder = live.run_folder / "trajectories"
    groups: Counter[str] = Counter()
    for version in range(1, NUM_STEPS + 1):
        rows = (folder / f"v{version}.jsonl").read_text().splitlines()
        groups.update({json.loads(row)["group"] for row in rows})
    assert set(groups.values()) == {1}
    assert len(groups) == live.tiny()["groups"]["trained"]


def assert_ended_well(live: LiveRun, order: list[str]) -> None:
    assert live.wait(300) == 0, f"killed {order}\n{live.story()}"
    tiny = live.tiny()
    assert tiny["version"] == NUM_STEPS
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])
    assert live.summary()["dead_letters"] == 0
    lines = (live.run_folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["version"] for line in lines] == list(range(1, NUM_STEPS + 1))
    assert_trained_once(live)


def test_in_sync_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    steps = f"trainer.num_steps={NUM_STEPS}"
    with start(tmp_path / "undisturbed", steps) as live:
        undisturbed = fingerprint(live, num_steps=NUM_STEPS)
    with start(tmp_path / "killed", steps) as live:
        order = kill_all_in_turn(live, Random(1))
        assert_ended_well(live, order)
        assert fingerprint(live, num_steps=NUM_STEPS) == undisturbed, order


def test_in_async_no_group_is_lost_or_trained_twice(tmp_path: Path) -> None:
    with start(tmp_path, f"trainer.num_steps={NUM_STEPS}", *ASYNC) as live:
        order = kill_all_in_turn(live, Random(2))
        assert_ended_well(live, order)
