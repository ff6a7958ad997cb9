"""Tells trackers what the trainer recorded, on a thread of its own.

The trainer must neither wait for a tracker nor end with it: what one raises, or a disk that is full, is
logged once, and the run goes on without that tracker; one that hangs hangs here.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import structlog

from jigsawrl.contract.requests import EvaluationResult
from services.trainer.tracking.base import Point, Tracker, point_of, point_of_evaluation

log = structlog.get_logger()

MAX_WAITING = 100_000
"""Points; beyond it a tracker hangs, and later ones are dropped."""

Work = Callable[[Tracker], None]


class Tracking:
    """The trackers of one trainer. Its methods return at once."""

    def __init__(self, trackers: Iterable[Tracker]) -> None:
        self._lanes = [_Lane(tracker) for tracker in trackers]
        self._evaluated: dict[int, EvaluationResult] = {}

    def begin(self, lines: Sequence[dict[str, Any]]) -> None:
        """These lines of ``metrics.jsonl`` stand, and no others."""
        points = [point_of(line) for line in lines]
        self._tell(lambda tracker: tracker.begin(points))

    def add(self, line: dict[str, Any]) -> None:
        """One more line."""
        self._add(point_of(line))

    def add_evaluations(self, results: Iterable[EvaluationResult]) -> None:
        """All that are known; those that were told already are left out."""
        for result in results:
            if self._evaluated.get(result.version) != result:
                self._evaluated[result.version] = result
                self._add(point_of_evaluation(result, time_s=time.time()))

    async def close(self, *, timeout_s: float) -> None:
        """End all; those that take longer are left."""
        for lane in self._lanes:
            lane.end()
        waiting = [asyncio.to_thread(lane.join, timeout_s) for lane in self._lanes]
        await asyncio.gather(*waiting)

    def _add(self, point: Point) -> None:
        self._tell(lambda tracker: tracker.add(point))

    def _tell(self, work: Work) -> None:
        for lane in self._lanes:
            lane.put(work)


class _Lane:
    """One tracker and its thread, a daemon: a process that ends does not wait for it."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._work: queue.Queue[Work | None] = queue.Queue(MAX_WAITING)
        self._failed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"tracking-{tracker.name}", daemon=True
        )
        self._thread.start()

    def put(self, work: Work) -> None:
        if not self._failed.is_set():
            try:
                self._work.put_nowait(work)
            except queue.Full:
                self._fail("it takes nothing more")

    def end(self) -> None:
        try:
            self._work.put_nowait(None)
        except queue.Full:
            return

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (work := self._work.get()) is not None and not self._failed.is_set():
            self._do(work)
        if not self._failed.is_set():
            self._do(lambda tracker: tracker.close())

    def _do(self, work: Work) -> None:
        try:
            work(self._tracker)
        except Exception as error:
            self._fail(str(error) or type(error).__name__)

    def _fail(self, reason: str) -> None:
        self._failed.set()
        log.warning(
            "a tracker failed, and the run goes on without it: metrics.jsonl has all that it lacks",
            tracker=self._tracker.name,
            reason=reason,
        )
