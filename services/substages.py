"""Spans of a worker's work and waiting, summed by kind and version until they are sent. Rollout workers
and the reward service use it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import msgspec

from jigsawrl.contract.events import SubStagesEnded
from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.parts import SubStage
from services.run import Context

PERIOD_S = 0.5
"""Between two reports."""


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


class Wait:
    """Counts the time in which a worker waits, once, however many things it waits for."""

    def __init__(self, kind: SubStageKind, substages: SubStages) -> None:
        self._kind = kind
        self._substages = substages
        self._version = 0
        self._since: tuple[float, float] | None = None
        """Wall clock and counter at which the time that runs began; None while none runs."""

    def of_version(self, version: int) -> None:
        """What follows counts as waiting of this version."""
        self.cut()
        self._version = version

    def runs(self, runs: bool) -> None:
        """Whether it waits from now on."""
        self.cut()
        self._since = (time.time(), time.perf_counter()) if runs else None

    def cut(self) -> None:
        """Count what has run so far."""
        if self._since is None:
            return
        started_s, begun = self._since
        self._since = (time.time(), time.perf_counter())
        self._substages.add(
            self._kind,
            version=self._version,
            started_s=started_s,
            duration_s=self._since[1] - begun,
            num_tokens=0,
        )


class LastWait:
    """Counts, of the waits for a version, the last one only: where they pass beside other work, it
    alone delays what comes after that version's work. It is known to be the last when another version's
    comes, and counted then."""

    def __init__(self, kind: SubStageKind, substages: SubStages) -> None:
        self._kind = kind
        self._substages = substages
        self._last: tuple[int, float, float] | None = None
        """Version, start and duration."""

    def ended(self, *, version: int, started_s: float, duration_s: float) -> None:
        """One wait is over."""
        if self._last is not None and self._last[0] != version:
            of_version, last_started_s, last_duration_s = self._last
            self._substages.add(
                self._kind,
                version=of_version,
                started_s=last_started_s,
                duration_s=last_duration_s,
                num_tokens=0,
            )
        self._last = version, started_s, duration_s


async def tell_substages(
    context: Context, substages: SubStages, waits: Iterable[Wait], *, period_s: float = PERIOD_S
) -> None:
    """Publish what was done in each period, until cancelled."""
    while True:
        await asyncio.sleep(period_s)
        await publish_substages(context, substages, waits)


async def publish_substages(context: Context, substages: SubStages, waits: Iterable[Wait]) -> None:
    """What was done since the last time, with the part of `waits` that falls into it."""
    for wait in waits:
        wait.cut()
    spans = substages.take()
    if spans:
        await context.bus.publish_event(
            SubStagesEnded(
                id=context.new_id(SubStagesEnded.tag()),
                pipeline=context.pipeline,
                worker=context.worker,
                spans=spans,
            )
        )
