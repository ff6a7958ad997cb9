"""What a tracker is told, and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from jigsawrl.contract.requests import EvaluationResult

SECTIONS = ("staleness", "substage")
"""Metrics whose names begin so stand together; the others are of the step as a whole."""

_HEAD = ("version", "incarnation", "gang_epoch", "time_s")
"""Of a line of ``metrics.jsonl``: what is no metric."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Values at one version, by their names in the viewer."""

    version: int
    time_s: float
    """Seconds since the epoch."""
    values: dict[str, float]


class Tracker(Protocol):
    """One kind of files; called from one thread. What it raises ends it, and nothing else."""

    name: str

    def begin(self, points: Sequence[Point]) -> None:
        """These and no others have been: forget whatever an earlier process wrote."""

    def add(self, point: Point) -> None:
        """One more. Of a version there may be two: of its step, and of its evaluation."""

    def close(self) -> None:
        """Nothing follows."""


def point_of(line: dict[str, Any]) -> Point:
    """Of one line of ``metrics.jsonl``, whose numbers that are not finite are texts."""
    values = {
        _shown(name): float(value)
        for name, value in line.items()
        if name not in _HEAD and isinstance(value, int | float | str)
    }
    return Point(version=line["version"], time_s=line["time_s"], values=values)


def point_of_evaluation(result: EvaluationResult, *, time_s: float) -> Point:
    """Of greedy answers on the held-out set."""
    values = {
        "evaluation/accuracy": result.accuracy,
        "evaluation/reward_mean": result.mean_reward,
    }
    return Point(version=result.version, time_s=time_s, values=values)


def _shown(name: str) -> str:
    """``substage_prefill_s`` -> ``substage/prefill_s``: what precedes ``/`` is a section in viewers."""
    section, _, rest = name.partition("_")
    return f"{section}/{rest}" if section in SECTIONS else f"train/{name}"
