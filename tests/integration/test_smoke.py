"""One short run of the whole system: it ends well and leaves behind what it should."""

from __future__ import annotations

import json

from tests.integration.conftest import FinishedRun
from tests.integration.live_run import (
    GROUP_SIZE,
    GROUPS_PER_BATCH,
    NUM_STEPS,
    ROLES,
    conserved,
)


def test_a_run_ends_with_its_summary_as_the_last_line(finished: FinishedRun) -> None:
    summary = finished.live.summary()
    assert summary["run"] == str(finished.live.run_folder)
    assert summary["dead_letters"] == 0
    tiny = finished.live.tiny()
    assert tiny["version"] == NUM_STEPS
    assert 0 < tiny["eval_before"] <= 1
    assert 0 <= tiny["eval_after"] <= 1
    assert tiny["tokens_per_s"] > 0
    assert tiny["groups"]["trained"] == NUM_STEPS * GROUPS_PER_BATCH
    assert conserved(tiny["groups"])
    assert conserved(tiny["sequences"])


def test_a_run_leaves_its_config_metrics_trajectories_checkpoints_and_logs(
    finished: FinishedRun,
) -> None:
    folder = finished.live.folder
    config = json.loads((folder / "config.json").read_text())
    assert config["trainer"]["num_steps"] == NUM_STEPS
    summary = json.loads((finished.live.run_folder / "summary.json").read_text())
    assert summary == finished.live.summary()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == NUM_STEPS
    trajectories = sorted((folder / "trajectories").glob("v*.jsonl"))
    assert len(trajectories) == NUM_STEPS
    for path in trajectories:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        assert len(rows) == GROUPS_PER_BATCH * GROUP_SIZE
    assert list((folder / "checkpoints").glob(f"v{NUM_STEPS}-*"))
    logs = {path.name for path in (finished.live.run_folder / "node" / "logs").glob("*.log")}
    assert {"tiny.trainer0.log", "tiny.rollout0.log", "tiny.evaluation0.log"} <= logs


def test_engine_and_trainer_agree_on_the_log_probs_of_fresh_data(finished: FinishedRun) -> None:
    lines = (finished.live.folder / "metrics.jsonl").read_text().splitlines()
    gaps = [json.loads(line)["logprob_gap_max"] for line in lines]
    assert 0 < max(gaps) < 1e-4


def test_every_service_is_a_process_of_its_own(finished: FinishedRun) -> None:
    pids = finished.recording.pids
    assert set(pids) >= set(ROLES)
    each = [next(iter(pids[role])) for role in ROLES]
    assert len(set(each)) == len(ROLES)


def test_only_the_trainer_is_told_where_the_run_folder_is(finished: FinishedRun) -> None:
    arguments = finished.recording.arguments
    for role in ("environment", "reward", "rollout", "evaluation"):
        assert not any(str(finished.live.run_folder) in part for part in arguments[role])
    assert str(finished.live.folder) in arguments["trainer"]


def test_plain_output_has_a_line_for_each_step_and_evaluation(finished: FinishedRun) -> None:
    text = finished.live.stdout
    assert f"of {NUM_STEPS}" in text
    assert "version 0: held-out accuracy" in text
    assert f"version {NUM_STEPS}: held-out accuracy" in text
