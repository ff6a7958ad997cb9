"""Trackers of whole runs, read back: each version once, evaluations too, whatever was trained again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_run import QUICK, LiveRun
from tests.tracker_files import history, scalars

pytestmark = pytest.mark.slow

NUM_STEPS = 8


def test_a_trainer_that_is_killed_leaves_each_version_once_in_all_trackers(
    tmp_path: Path,
) -> None:
    overrides = (
        "tracking.tensorboard=true",
        "tracking.wandb.project=tiny",
        f"trainer.num_steps={NUM_STEPS}",
        "trainer.checkpoint.every=3",
        "evaluation.every=4",
    )
    with LiveRun(tmp_path, *overrides, pipeline=QUICK) as live:
        live.until(lambda: live.num_steps_done() >= 4)
        live.kill("trainer")
        assert live.wait() == 0, live.story()
        folder = live.folder
    told = scalars(folder)
    rewards = [version for version, tag, _ in told if tag == "train/reward_mean"]
    assert rewards == list(range(1, NUM_STEPS + 1))
    accuracies = {v: x for v, tag, x in told if tag == "evaluation/accuracy"}
    assert {0, NUM_STEPS} <= set(accuracies)
    assert accuracies[NUM_STEPS] == pytest.approx(live.tiny()["eval_after"])
    assert len(accuracies) == sum(tag == "evaluation/accuracy" for _, tag, _ in told)
    names = {tag for _, tag, _ in told}
    assert {"train/loss", "train/tokens_per_s", "staleness/total_max"} <= names
    rows = history(folder)
    assert [row["version"] for row in rows if "train/loss" in row] == rewards
    assert {row["version"] for row in rows if "evaluation/accuracy" in row} == set(accuracies)
