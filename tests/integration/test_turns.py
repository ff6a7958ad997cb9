"""Whole runs of two turns: what is trained, also where the environment and workers die meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jigsawrl.turns import turn_spans
from tests.integration.live_run import PIPELINE, LiveRun, conserved
from tests.integration.test_exactness import fingerprint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 3
TWICE = PIPELINE.replace("num_held_out = 50", "num_held_out = 50\nnum_turns = 2").replace(
    "max_new_tokens = 8", "max_new_tokens = 8\ntemperature = 0.3"
)
"""Cold sampling: some first answers of the hardly warmed-up model are right, and some are wrong."""
SLOW = TWICE.partition("[evaluation]")[0]
"""Its environment thinks, so that sequences move, and processes die, while it does."""

EXACT = ("task.turn_delay_s=0.5", "evaluation.enabled=false", "rollout.engine.deterministic=true")


def trajectories(live: LiveRun) -> list[dict[str, Any]]:
    paths = sorted((live.folder / "trajectories").glob("v*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def test_two_turns_are_generated_trained_and_evaluated(tmp_path: Path) -> None:
    with LiveRun(tmp_path, pipeline=TWICE) as live:
        assert live.wait() == 0, live.story()
    rows = trajectories(live)
    num_turns = [len(turn_spans(row["versions"])) for row in rows]
    assert set(num_turns) == {1, 2}, "right first answers need no second one"
    for row, num in zip(rows, num_turns, strict=True):
        assert [version >= 0 for version in row["versions"]] == [bool(m) for m in row["loss_mask"]]
        assert row["reward"] == 1 or num == 2, "a wrong answer is tried again"
    lines = (live.folder / "metrics.jsonl").read_text().splitlines()
    assert max(json.loads(line)["logprob_gap_max"] for line in lines) < 1e-4
    assert any("substage_reward_wait_s" in json.loads(line) for line in lines)
    tiny = live.tiny()
    assert tiny["version"] == NUM_STEPS
    assert 0 < tiny["eval_before"] <= 1
    assert conserved(tiny["sequences"])
    assert tiny["sequences"]["failed"] == 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with LiveRun(folder, *EXACT, pipeline=SLOW) as live:
        result = fingerprint(live, num_steps=NUM_STEPS)
    lines = (live.folder / "metrics.jsonl").read_text().splitlines()
    assert any("substage_tool_wait_s" in json.loads(line) for line in lines)
    return result


def test_moves_and_kills_while_sequences_wait_change_no_bit(
    undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    two = "rollout.num_workers=2"
    with LiveRun(tmp_path, *EXACT, two, pipeline=SLOW, policy="shuffle") as live:
        live.until(lambda: live.num_steps_done() >= 1)
        live.kill("environment")
        live.until(lambda: live.num_steps_done() >= 2)
        live.kill("rollout")
        assert live.wait(300) == 0, live.story()
        assert fingerprint(live, num_steps=NUM_STEPS) == undisturbed
    tiny = live.tiny()
    assert tiny["num_migrations"] > 0
    assert conserved(tiny["sequences"])
    assert tiny["sequences"]["failed"] == 0
