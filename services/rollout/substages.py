"""Spans of engine work, summed by kind and version until they are sent."""

from __future__ import annotations

import msgspec

from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.parts import SubStage


class SubStages:
    """What was done since the last `take`."""

    def __init__(self) -> None:
        self._spans: dict[tuple[SubStageKind, int], SubStage] = {}

    def add(
        self,
        kind: SubStageKind,
        *,
        version: int,
        started_s: float,
        duration_s: float,
        num_tokens: int,
        cpu_s: float | None = None,
    ) -> None:
        """Count one iteration of work."""
        span = self._spans.get((kind, version))
        if span is None:
            span = SubStage(
                kind=kind,
                version=version,
                started_s=started_s,
                ended_s=started_s,
                duration_s=0.0,
                num_iterations=0,
                num_tokens=0,
                cpu_s=None if cpu_s is None else 0.0,
            )
        self._spans[kind, version] = msgspec.structs.replace(
            span,
            ended_s=started_s + duration_s,
            duration_s=span.duration_s + duration_s,
            num_iterations=span.num_iterations + 1,
            num_tokens=span.num_tokens + num_tokens,
            cpu_s=None if span.cpu_s is None or cpu_s is None else span.cpu_s + cpu_s,
        )

    def take(self) -> tuple[SubStage, ...]:
        """The spans so far; starts anew."""
        spans = tuple(self._spans.values())
        self._spans.clear()
        return spans
