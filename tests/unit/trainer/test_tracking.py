"""What trackers leave on disk, read back; and trackers that fail."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tensorboardX.proto.event_pb2 import SessionLog

from jigsawrl.config import InitModelConfig, PipelineConfig, SortDigitsConfig, TrainerConfig
from jigsawrl.config_tracking import TrackingConfig, WandbConfig
from jigsawrl.contract.requests import EvaluationResult
from services.trainer.recorder import MetricsLine, Recorder
from services.trainer.tracking import build_tracking
from services.trainer.tracking.base import Point, point_of
from services.trainer.tracking.tracking import Tracking
from tests.tracker_files import events, history, scalars, wandb_records


def config(**tracking: Any) -> PipelineConfig:
    return PipelineConfig(
        name="p",
        model=InitModelConfig(),
        task=SortDigitsConfig(),
        trainer=TrainerConfig(num_steps=9),
        tracking=TrackingConfig(**tracking),
    )


def line(version: int, **metrics: float) -> MetricsLine:
    return MetricsLine(
        version=version, incarnation=0, gang_epoch=1, time_s=1e9 + version, metrics=metrics
    )


def evaluation(version: int, accuracy: float) -> EvaluationResult:
    return EvaluationResult(version=version, accuracy=accuracy, num_problems=8, mean_reward=0.5)


async def test_event_files_hold_each_version_once_whatever_was_trained_again(
    tmp_path: Path,
) -> None:
    for cut, versions in ((0, (1, 2, 3)), (1, (2, 3, 4))):  # the second trainer is back at 1
        tracking = build_tracking(config(tensorboard=True), tmp_path)
        assert tracking is not None
        recorder = Recorder(tmp_path, tracking=tracking)
        recorder.cut_back(cut)
        for version in versions:
            recorder.record(line(version, reward_mean=cut + version, substage_prefill_s=2.0), [])
            recorder.record(line(version, reward_mean=99.0), [])  # a repeat
        tracking.add_evaluations([evaluation(0, 0.25)])
        tracking.add_evaluations([evaluation(0, 0.25), evaluation(4, 0.75)])
        await tracking.close(timeout_s=10)
    told = scalars(tmp_path)
    assert [(v, x) for v, tag, x in told if tag == "train/reward_mean"] == [
        (1, 1.0),
        (2, 3.0),
        (3, 4.0),
        (4, 5.0),
    ]
    assert [(v, x) for v, tag, x in told if tag == "evaluation/accuracy"] == [(0, 0.25), (4, 0.75)]
    assert {tag for _, tag, _ in told} == {
        "train/reward_mean",
        "substage/prefill_s",
        "evaluation/accuracy",
        "evaluation/reward_mean",
    }
    first, start, *rest = events(tmp_path)
    assert first.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START, "an open viewer forgets what it has read"
    assert rest[0].wall_time == 1e9 + 1


async def test_trackers_begin_before_the_trainer_has_written_anything(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "p"
    tracking = build_tracking(config(tensorboard=True, wandb=WandbConfig()), folder)
    assert tracking is not None
    tracking.begin([])
    tracking.add({"version": 1, "time_s": 1.0, "loss": 0.5})
    await tracking.close(timeout_s=60)
    assert scalars(folder) == [(1, "train/loss", 0.5)]
    assert history(folder) == [{"version": 1, "train/loss": 0.5}]


async def test_a_viewer_that_is_open_gets_past_older_files(tmp_path: Path) -> None:
    older, oldest = (
        tmp_path / "tensorboard" / f"events.out.tfevents.100000000{n}.h" for n in (2, 1)
    )
    older.parent.mkdir()
    older.write_bytes(b"what an earlier trainer wrote")
    oldest.touch()
    tracking = build_tracking(config(tensorboard=True), tmp_path)
    assert tracking is not None
    tracking.begin([])
    await tracking.close(timeout_s=10)
    assert older.stat().st_size == 0
    assert not oldest.exists()
    names = sorted(path.name for path in older.parent.iterdir())
    assert (names[0], len(names)) == (older.name, 2), "a viewer goes on with what is next by name"


async def test_an_offline_run_holds_each_version_once_under_one_id(tmp_path: Path) -> None:
    ids = set()
    for cut, versions in ((0, (1, 2)), (1, (2, 3))):
        tracking = build_tracking(config(wandb=WandbConfig(project="mine")), tmp_path)
        assert tracking is not None
        recorder = Recorder(tmp_path, tracking=tracking)
        recorder.cut_back(cut)
        for version in versions:
            recorder.record(line(version, loss=float(version)), [])
        tracking.add_evaluations([evaluation(1, 0.5)])
        await tracking.close(timeout_s=60)
        runs = [record.run for record in wandb_records(tmp_path) if record.HasField("run")]
        assert {run.project for run in runs} == {"mine"}
        ids |= {run.run_id for run in runs}
    rows = history(tmp_path)
    assert [(row["version"], row["train/loss"]) for row in rows if "train/loss" in row] == [
        (1, 1.0),
        (2, 2.0),
        (3, 3.0),
    ]
    assert [row["version"] for row in rows if "evaluation/accuracy" in row] == [1]
    assert len(ids) == 1


def test_numbers_that_are_not_finite_and_sections_are_understood() -> None:
    point = point_of(
        {"version": 3, "incarnation": 0, "gang_epoch": 1, "time_s": 5.0, "loss": "nan"}
        | {"staleness_total_max": 2.0, "kl": "-inf"}
    )
    assert (point.version, point.time_s) == (3, 5.0)
    assert point.values["train/loss"] != point.values["train/loss"]
    assert point.values["train/kl"] == float("-inf")
    assert point.values["staleness/total_max"] == 2.0


class Broken:
    """Fails, or hangs, as it is told to."""

    name = "broken"

    def __init__(self, fault: Callable[[], None]) -> None:
        self.told: list[int] = []
        self._fault = fault

    def begin(self, points: Sequence[Point]) -> None:
        """Nothing to forget."""

    def add(self, point: Point) -> None:
        self.told.append(point.version)
        self._fault()

    def close(self) -> None:
        raise AssertionError("one that failed is left alone")


def no_room() -> None:
    raise OSError(28, "No space left on device")


async def test_a_tracker_that_fails_is_told_of_once_and_the_others_go_on(tmp_path: Path) -> None:
    broken, whole = Broken(no_room), build_tracking(config(tensorboard=True), tmp_path)
    assert whole is not None
    with capture_logs() as lines:
        tracking = Tracking([broken])
        for told in (tracking, whole):
            told.begin([])
            for version in (1, 2, 3):
                told.add({"version": version, "time_s": 1.0, "loss": 1.0})
            await told.close(timeout_s=10)
    assert broken.told == [1]
    (warning,) = [entry for entry in lines if entry.get("tracker") == "broken"]
    assert "No space left on device" in warning["reason"]
    assert [version for version, _, _ in scalars(tmp_path)] == [1, 2, 3]


async def test_a_tracker_that_hangs_holds_nobody_up() -> None:
    tracking = Tracking([Broken(lambda: time.sleep(30))])
    tracking.begin([])
    tracking.add({"version": 1, "time_s": 1.0})
    started_s = time.monotonic()
    await tracking.close(timeout_s=0.2)
    assert time.monotonic() - started_s < 20


def test_a_pipeline_that_asks_for_none_has_none(tmp_path: Path) -> None:
    assert build_tracking(config(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_refused_by_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ValueError, match=r"tracking\.tensorboard: tensorboardX is missing on this"):
        build_tracking(config(tensorboard=True), tmp_path)
