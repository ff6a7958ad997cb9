"""Checkpoints: real once marked, whole or not used, and records that follow them."""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch

from jigsawrl.contract.message import Ledger
from jigsawrl.models.tokenizer import build_tokenizer
from services.trainer import checkpoint
from services.trainer.batch import Sample
from services.trainer.recorder import MetricsLine, Recorder

WEIGHTS = torch.arange(6, dtype=torch.float32).reshape(2, 3)


def files_of(run: Path, version: int, gang_epoch: int = 1) -> Path:
    return checkpoint.write_files(
        run,
        state=checkpoint.CheckpointState(
            pipeline="p",
            version=version,
            gang_epoch=gang_epoch,
            ledger=Ledger(cursor=7),
            dtype="float32",
            model_config='{"model_type": "qwen3"}',
        ),
        tensors={"model": {"w": WEIGHTS + version}},
        tokenizer=build_tokenizer("01"),
    )


def commit(run: Path, version: int, gang_epoch: int = 1) -> Path:
    folder = files_of(run, version, gang_epoch)
    checkpoint.commit(folder)
    return folder


def test_what_was_saved_is_read_back(tmp_path: Path) -> None:
    commit(tmp_path, 3)
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    assert (saved.state.version, saved.state.ledger.cursor) == (3, 7)
    assert torch.equal(saved.tensors["model"]["w"], WEIGHTS + 3)


def test_a_trainer_killed_before_the_marker_leaves_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    commit(tmp_path, 1)
    files_of(tmp_path, 2)  # and died here
    assert (tmp_path / "checkpoints" / "v2-e1" / "model.safetensors").exists()
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    assert saved.state.version == 1
    commit(tmp_path, 2)  # and the next attempt is not in its way
    assert checkpoint.committed(tmp_path)[0].name == "v2-e1"


def test_the_marker_is_created_once(tmp_path: Path) -> None:
    folder = commit(tmp_path, 1)
    with pytest.raises(FileExistsError):
        checkpoint.commit(folder)


def test_a_replaced_gang_can_not_win(tmp_path: Path) -> None:
    commit(tmp_path, 10, gang_epoch=1)
    commit(tmp_path, 11, gang_epoch=2)
    commit(tmp_path, 12, gang_epoch=1)
    assert [folder.name for folder in checkpoint.committed(tmp_path)] == [
        "v11-e2",
        "v12-e1",
        "v10-e1",
    ]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "marker"])
def test_a_corrupt_checkpoint_falls_back_to_an_older_one(tmp_path: Path, damage: str) -> None:
    commit(tmp_path, 1)
    newest = commit(tmp_path, 2)
    path = newest / ("COMMITTED" if damage == "marker" else "model.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "flip":
        content[-1] ^= 1
        path.write_bytes(content)
    else:
        path.write_bytes(content[: len(content) // 2])
    saved = checkpoint.latest(tmp_path)
    assert saved is not None
    assert saved.state.version == 1


def test_where_all_are_corrupt_one_line_says_so(tmp_path: Path) -> None:
    (commit(tmp_path, 1) / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"all checkpoints in .* are corrupt") as caught:
        checkpoint.latest(tmp_path)
    assert "\n" not in str(caught.value)


def test_only_the_last_are_kept(tmp_path: Path) -> None:
    for version in range(4):
        commit(tmp_path, version)
    files_of(tmp_path, 9)
    checkpoint.prune(tmp_path, keep_last=2, gang_epoch=1)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["v2-e1", "v3-e1"]


def test_a_replaced_gang_leaves_what_its_successor_writes(tmp_path: Path) -> None:
    commit(tmp_path, 5)
    commit(tmp_path, 3, gang_epoch=2)
    half_written = files_of(tmp_path, 4, gang_epoch=2)
    checkpoint.prune(tmp_path, keep_last=1, gang_epoch=1)
    checkpoint.commit(half_written)
    names = sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir())
    assert names == ["v3-e2", "v4-e2", "v5-e1"]


def test_a_checkpoint_that_goes_while_it_is_looked_at_gives_way_to_the_newer_one(
    tmp_path: Path,
) -> None:
    pruned = commit(tmp_path, 1)
    # Its state can't be read before its successor is there, as where a replaced gang goes on.
    (pruned / "state.json").unlink()
    os.mkfifo(pruned / "state.json")

    def go_on() -> None:
        with (pruned / "state.json").open("wb"):
            commit(tmp_path, 2)

    with ThreadPoolExecutor(1) as pool:
        gone = pool.submit(go_on)
        saved = checkpoint.latest(tmp_path)
        gone.result()
    assert saved is not None
    assert saved.state.version == 2


def line(version: int) -> MetricsLine:
    return MetricsLine(
        version=version, incarnation=1, gang_epoch=1, time_s=0.0, metrics={"loss": 0.5}
    )


def test_records_are_cut_back_to_the_restored_version(
    tmp_path: Path, samples: list[Sample]
) -> None:
    recorder = Recorder(tmp_path)
    for version in (1, 2, 3):
        recorder.record(line(version), samples)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"version":4,"lo')  # killed while it wrote
    restored = Recorder(tmp_path)
    restored.cut_back(1)
    restored.record(line(2), samples[:1])
    restored.record(line(2), samples)  # a repeat
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["version"] for entry in lines] == [1, 2]
    assert lines[0]["loss"] == 0.5
    files = {path.name for path in (tmp_path / "trajectories").iterdir()}
    assert files == {"v1.jsonl", "v2.jsonl"}
    assert len((tmp_path / "trajectories" / "v2.jsonl").read_text().splitlines()) == 1


def test_a_replaced_gang_records_no_version_twice(tmp_path: Path, samples: list[Sample]) -> None:
    old = Recorder(tmp_path)
    for version in (1, 2):
        old.record(line(version), samples)
    commit(tmp_path, 2, gang_epoch=2)
    new = Recorder(tmp_path)
    new.cut_back(2)
    old.record(line(3), samples)  # the step that it was at
    new.record(msgspec.structs.replace(line(3), gang_epoch=2), samples)
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(entry["version"], entry["gang_epoch"]) for entry in lines] == [(1, 1), (2, 1), (3, 2)]


def test_a_refused_batch_stays_when_an_older_version_is_restored(
    tmp_path: Path, samples: list[Sample]
) -> None:
    Recorder(tmp_path).keep_refused(4, samples)
    Recorder(tmp_path).cut_back(3)
    assert (tmp_path / "trajectories" / "refused-v4.jsonl").exists()


def test_numbers_that_are_not_finite_stay_visible(tmp_path: Path, samples: list[Sample]) -> None:
    infinite = float("inf")
    logprobs = torch.full_like(samples[0].logprobs, -infinite)
    bad = dataclasses.replace(samples[0], reward=float("nan"), logprobs=logprobs)
    recorder = Recorder(tmp_path)
    metrics = {"loss": 0.5, "logprob_gap_max": infinite}
    recorder.record(msgspec.structs.replace(line(1), metrics=metrics), [bad])
    (written,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(written)["logprob_gap_max"] == "inf"
    (trajectory,) = (tmp_path / "trajectories" / "v1.jsonl").read_text().splitlines()
    assert json.loads(trajectory)["reward"] == "nan"
    assert set(json.loads(trajectory)["logprobs"]) == {"-inf"}


def test_a_trajectory_holds_all_that_was_trained_on(tmp_path: Path, samples: list[Sample]) -> None:
    Recorder(tmp_path).record(line(1), samples)
    texts = (tmp_path / "trajectories" / "v1.jsonl").read_text().splitlines()
    assert len(texts) == len(samples)
    first = json.loads(texts[0])
    assert first["tokens"] == samples[0].tokens.tolist()
    assert first["logprobs"] == pytest.approx(samples[0].logprobs.tolist())
    assert first["versions"] == samples[0].versions.tolist()
    assert first["reward"] == samples[0].reward
