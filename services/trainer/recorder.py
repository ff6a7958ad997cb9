"""What the trainer leaves in the run folder for people: ``metrics.jsonl``, one line per step, and
``trajectories/v<version>.jsonl``, one line per trained sequence.

Both are named by the version that the step made. They follow the checkpoint: a trainer that is back at
version c cuts them back to c, and makes the later lines again. Writing a version twice changes nothing.
So does a gang that was replaced and still runs: once its successor writes checkpoints, which it does
before it cuts back, the record is the successor's alone.
A batch that was refused (``refused-v<version>.jsonl``) is evidence and stays, whatever is restored.

JSON has no numbers that are not finite; they are written as the strings "nan", "inf" and "-inf".
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from services.trainer import checkpoint
from services.trainer.batch import Sample
from services.trainer.tracking.tracking import Tracking

METRICS_FILE = "metrics.jsonl"
TRAJECTORIES_FOLDER = "trajectories"
_NAME = re.compile(r"v(\d+)\.jsonl")


class MetricsLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of ``metrics.jsonl``."""

    version: int
    incarnation: int
    gang_epoch: int
    time_s: float
    """Wall clock when the step ended, seconds since the epoch."""
    metrics: dict[str, float]


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a trajectory file. Rewards are those that were trained on."""

    group: str
    sequence: str
    reward: float
    text: str
    num_prompt_tokens: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    loss_mask: list[int]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A step that was trained."""

    samples: Sequence[Sample]
    line: MetricsLine


class Recorder:
    """Writes into one run folder, and tells trackers of it."""

    def __init__(self, run_folder: Path, *, tracking: Tracking | None = None) -> None:
        self._run_folder = run_folder
        self._tracking = tracking
        self._metrics = run_folder / METRICS_FILE
        self._trajectories = run_folder / TRAJECTORIES_FOLDER
        self._last_version = 0

    def cut_back(self, version: int) -> None:
        """Forget every later version; an unfinished last line goes too."""
        self._last_version = version
        kept: list[bytes] = []
        if self._metrics.exists():
            kept = [
                line
                for line in self._metrics.read_bytes().splitlines(keepends=True)
                if line.endswith(b"\n") and _version_of(line) <= version
            ]
            _replace(self._metrics, b"".join(kept))
        if self._tracking is not None:
            self._tracking.begin([msgspec.json.decode(line) for line in kept])
        for path in self._trajectories.glob("*.jsonl"):
            match = _NAME.fullmatch(path.name)
            if match and int(match[1]) > version:
                path.unlink()

    def record(self, line: MetricsLine, samples: Sequence[Sample]) -> None:
        """Append a step, trajectories first; a version that is there already is left as it is."""
        if line.version <= self._last_version:
            return
        if checkpoint.is_replaced(self._run_folder, gang_epoch=line.gang_epoch):
            return
        self._write_trajectories(f"v{line.version}.jsonl", samples)
        fields = msgspec.structs.asdict(line)
        fields |= fields.pop("metrics")
        with self._metrics.open("ab") as file:
            file.write(_encode(fields))
        self._last_version = line.version
        if self._tracking is not None:
            self._tracking.add(fields)

    def keep_refused(self, version: int, samples: Sequence[Sample]) -> None:
        """Keep the batch of a step that was refused, for people to look at."""
        self._write_trajectories(f"refused-v{version}.jsonl", samples)

    def _write_trajectories(self, name: str, samples: Sequence[Sample]) -> None:
        self._trajectories.mkdir(exist_ok=True)
        lines = [
            _encode(
                Trajectory(
                    group=sample.group,
                    sequence=sample.sequence,
                    reward=sample.reward,
                    text=sample.text,
                    num_prompt_tokens=sample.num_prompt_tokens,
                    tokens=sample.tokens.tolist(),
                    logprobs=sample.logprobs.tolist(),
                    versions=sample.versions.tolist(),
                    loss_mask=sample.mask.int().tolist(),
                )
            )
            for sample in samples
        ]
        _replace(self._trajectories / name, b"".join(lines))


def _encode(line: Trajectory | dict[str, object]) -> bytes:
    text = msgspec.json.encode(line)
    if (
        b"null" in text
    ):  # so the encoder writes what is not finite; lines are long and seldom hold any
        text = msgspec.json.encode(_readable(msgspec.to_builtins(line)))
    return text + b"\n"


def _readable(value: Any) -> Any:
    """The same with numbers that are not finite as text."""
    if isinstance(value, dict):
        return {key: _readable(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_readable(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _version_of(line: bytes) -> int:
    version = msgspec.json.decode(line)["version"]
    assert isinstance(version, int)
    return version


def _replace(path: Path, content: bytes) -> None:
    """All or nothing, for readers and for a crash in between."""
    temporary = path.with_suffix(".partial")
    temporary.write_bytes(content)
    os.replace(temporary, path)
