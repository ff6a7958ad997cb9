"""Counts what a leader folds: what passes and is in no state. On the hot path, hence plain dicts.

What the state knows is not counted again here; `pipeline_metrics` reads it when Prometheus asks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import (
    CheckpointCommitted,
    Event,
    SequencesFinished,
    SubStagesEnded,
    WorkerExited,
)
from jigsawrl.core.state import Pipeline
from jigsawrl.metrics import (
    CHECKPOINT_TIME,
    COMMANDS_ISSUED,
    DECISION_SECONDS,
    EVENTS_FOLDED,
    FOLD_BUCKETS,
    FOLD_LAG_SECONDS,
    FOLD_SECONDS,
    GENERATED_TOKENS,
    SUBSTAGE_BUCKETS,
    SUBSTAGE_SECONDS,
    WORKER_EXITS,
)
from services.exposition import Families, Histogram


class Meter:
    """Of one process, over all terms in which it leads."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: defaultdict[type[Event], int] = defaultdict(int)
        self._commands: defaultdict[type[Command], int] = defaultdict(int)
        self._folds = Histogram(FOLD_BUCKETS)
        self._decisions = Histogram(FOLD_BUCKETS)
        self._lag_s: float | None = None
        self._substages: defaultdict[tuple[str, str], Histogram] = defaultdict(
            partial(Histogram, SUBSTAGE_BUCKETS)
        )
        """By (pipeline, kind)."""
        self._tokens: defaultdict[str, int] = defaultdict(int)
        self._exits: defaultdict[tuple[str, str], int] = defaultdict(int)
        """By (pipeline, role)."""
        self._checkpoints: dict[str, float] = {}

    def folded(
        self,
        stored: StoredEvent,
        commands: Sequence[Command],
        *,
        taken_s: float,
        decided: bool,
        ignored: bool,
    ) -> None:
        """See `Watch.folded`."""
        event = stored.event
        assert event is not None
        self._events[type(event)] += 1
        (self._decisions if decided else self._folds).add(taken_s)
        self._lag_s = self._clock() - stored.timestamp_s
        for command in commands:
            self._commands[type(command)] += 1
        count = _COUNTS.get(type(event))
        if count is not None and event.pipeline is not None and not ignored:
            count(self, event.pipeline, event)

    def keep_to(self, live: Iterable[Pipeline]) -> None:
        """Forget what belongs to other pipelines, which have ended: series must not pile up. Those of
        these begin at 0: from what first appears at 1, Prometheus sees no increase."""
        kept = set()
        for pipeline in live:
            kept.add(pipeline.name)
            self._tokens.setdefault(pipeline.name, 0)
            for tenant in pipeline.tenants.values():
                self._exits.setdefault((pipeline.name, tenant.role), 0)
        for counts in (self._substages, self._exits):
            for key in [key for key in counts if key[0] not in kept]:
                del counts[key]
        for totals in (self._tokens, self._checkpoints):
            for name in [name for name in totals if name not in kept]:
                del totals[name]

    def add_to(self, families: Families) -> None:
        """All that was counted."""
        for event, num in self._events.items():
            families.add(EVENTS_FOLDED, num, event.tag())
        for command, num in self._commands.items():
            families.add(COMMANDS_ISSUED, num, command.tag())
        families.add_histogram(FOLD_SECONDS, self._folds)
        families.add_histogram(DECISION_SECONDS, self._decisions)
        families.add(FOLD_LAG_SECONDS, self._lag_s)
        for (pipeline, kind), histogram in self._substages.items():
            families.add_histogram(SUBSTAGE_SECONDS, histogram, pipeline, kind)
        for pipeline, num in self._tokens.items():
            families.add(GENERATED_TOKENS, num, pipeline)
        for (pipeline, role), num in self._exits.items():
            families.add(WORKER_EXITS, num, pipeline, role)
        for pipeline, committed_s in self._checkpoints.items():
            families.add(CHECKPOINT_TIME, committed_s, pipeline)

    def _count_substages(self, pipeline: str, event: SubStagesEnded) -> None:
        for span in event.spans:
            if span.num_iterations:
                mean_s = span.duration_s / span.num_iterations
                self._substages[pipeline, span.kind].add(mean_s, span.num_iterations)

    def _count_tokens(self, pipeline: str, event: SequencesFinished) -> None:
        self._tokens[pipeline] += sum(one.num_tokens for one in event.finished)

    def _count_exit(self, pipeline: str, event: WorkerExited) -> None:
        role = event.worker.id.rpartition(".")[2].rstrip("0123456789")
        self._exits[pipeline, role] += 1

    def _note_checkpoint(self, pipeline: str, event: CheckpointCommitted) -> None:
        self._checkpoints[pipeline] = self._clock()


_COUNTS: dict[type[Event], Callable[..., None]] = {
    SubStagesEnded: Meter._count_substages,
    SequencesFinished: Meter._count_tokens,
    WorkerExited: Meter._count_exit,
    CheckpointCommitted: Meter._note_checkpoint,
}
