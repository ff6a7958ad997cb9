"""Whole runs in which every sequence moves again and again, also while workers die or freeze: what is
computed has the bits of a run in which nothing moves."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jigsawrl.contract.commands import MigrateSequences
from services.scheduler.replay import replay
from tests.integration.live_run import LiveRun, conserved
from tests.integration.test_exactness import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 6
PIPELINE = f"""
name = "tiny"

[model]
type = "init"
hidden_size = 96
intermediate_size = 192
num_layers = 3
num_heads = 3
num_kv_heads = 1
max_position_embeddings = 256

[task]
type = "sort-digits"
min_digits = 2
max_digits = 3
num_held_out = 50

[rollout]
sampling.max_new_tokens = 160
engine.deterministic = true
engine.drawn_lengths = {{median_tokens = 70, p95_tokens = 150, max_tokens = 160}}

[algorithm]
group_size = 4
overlong = {{buffer_tokens = 150}}

[trainer]
num_steps = {NUM_STEPS}
groups_per_batch = 4
checkpoint.every = 2

[evaluation]
enabled = false
"""
"""Sequences of some 100 ms, so that they move while they live; the punishment of long ones is what is
learned from (the untrained model sorts nothing)."""

TWO = "rollout.num_workers=2"


def start(folder: Path, *changes: str, policy: str = "shuffle") -> LiveRun:
    return LiveRun(folder, *changes, pipeline=PIPELINE, policy=policy)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One worker, nothing moves."""
    with start(tmp_path_factory.mktemp("unmoved"), policy="serial") as live:
        result = fingerprint(live, num_steps=NUM_STEPS)
        assert live.tiny()["num_migrations"] == 0
    assert all(grad_norm > 0 for _, _, grad_norm in result["losses"]), "nothing was learned"
    return result


def assert_same(live: LiveRun, undisturbed: dict[str, Any], *, num_migrations: int) -> None:
    assert live.wait(300) == 0, live.story()
    assert fingerprint(live, num_steps=NUM_STEPS) == undisturbed
    tiny = live.tiny()
    assert tiny["num_migrations"] >= num_migrations
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])
    assert live.summary()["dead_letters"] == 0


def test_hundreds_of_moves_change_no_bit_and_make_no_token_twice(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with start(tmp_path, TWO) as live:
        assert_same(live, undisturbed, num_migrations=200)
        tiny = live.tiny()
        assert tiny["num_tokens_again"] == 0
    commands = replay(live.run_folder / "scheduler")
    orders = [x for x in commands if isinstance(x, MigrateSequences)]
    assert {order.worker.id for order in orders} == {"tiny.rollout0", "tiny.rollout1"}
    assert sum(len(order.sequences) for order in orders) >= tiny["num_migrations"]


def test_killed_sources_and_targets_change_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    random = Random(3)
    with start(tmp_path, TWO) as live:
        for kill in range(4):
            live.until(lambda done=kill + 1: live.num_steps_done() >= done)  # type: ignore[misc]
            time.sleep(random.uniform(0.0, 0.5))
            workers = live.workers("rollout")
            if workers:
                workers[random.choice(sorted(workers))].kill()
        assert_same(live, undisturbed, num_migrations=100)


def test_a_worker_that_is_frozen_amid_moves_and_returns_changes_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    with start(tmp_path, TWO) as live:
        live.until(lambda: live.num_steps_done() >= 2)
        live.until(lambda: len(live.workers("rollout")) == 2)
        frozen = live.workers("rollout")["tiny.rollout0"]
        frozen.send_signal(signal.SIGSTOP)
        time.sleep(12.0)  # leases of moves and placements end; the worker is not lost yet
        frozen.send_signal(signal.SIGCONT)
        assert_same(live, undisturbed, num_migrations=100)
