"""What the scheduler serves to Prometheus, leading or standing by.

A `Watch` of its process's leader. Three sources: what was counted as it passed (`meter`), the state
(`pipeline_metrics`), and NATS, which is asked how full its streams are. Where NATS does not answer in
time those are left out, and the rest is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jigsawrl.bus.base import Bus, BusError, Fill, StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.core.state import State
from jigsawrl.metrics import (
    COMMANDS_PENDING,
    DEAD_LETTERS,
    FOLD_LAG,
    LEADER_EPOCH,
    LEADS,
    SNAPSHOT_FAILED,
    SNAPSHOT_LAG,
    STREAM_BYTES,
    STREAM_LIMIT,
    STREAM_MESSAGES,
)
from services.exposition import Families, add_disk
from services.scheduler.journal import Journal
from services.scheduler.meter import Meter
from services.scheduler.outgoing import Outgoing
from services.scheduler.pipeline_metrics import add_cluster, add_pipeline

STREAMS_TIMEOUT_S = 2.0
"""For all streams together; a scrape has `exposition.GATHER_TIMEOUT_S`."""

STREAMS_PERIOD_S = 5.0
"""Streams are asked for at most this often, however many scrape."""


class _Term(NamedTuple):
    state: State
    journal: Journal
    outgoing: Outgoing


class SchedulerMetrics:
    """Of one process."""

    def __init__(self, bus: Bus, *, host: str, folder: Path) -> None:
        """`host` stands where a tenant's id would: not what names this process alone, which would make
        new series at each restart."""
        self._bus = bus
        self._host = host
        self._folder = folder
        self._meter = Meter()
        self._term: _Term | None = None
        self._fills: tuple[Fill, ...] = ()
        self._filled_s = float("-inf")

    # --- As a Watch -------------------------------------------------------------------------------

    def leads(self, state: State, journal: Journal, outgoing: Outgoing) -> None:
        """Tell of its state from now on."""
        self._term = _Term(state, journal, outgoing)

    def folded(
        self,
        stored: StoredEvent,
        commands: Sequence[Command],
        *,
        taken_s: float,
        decided: bool,
        ignored: bool,
    ) -> None:
        """Count it."""
        self._meter.folded(stored, commands, taken_s=taken_s, decided=decided, ignored=ignored)

    def ended(self) -> None:
        """Another one's state is no news any more."""
        self._term = None

    # --- A scrape ---------------------------------------------------------------------------------

    async def gather(self) -> Families:
        """All that this process knows now."""
        families = Families()
        families.add_health(self._bus.health, "", "scheduler", self._host)
        await asyncio.to_thread(add_disk, families, "scheduler", self._folder)
        if self._term is not None:
            await self._look_at_streams(self._term.state)
        term = self._term  # it may have ended meanwhile
        families.add(LEADS, term is not None)
        if term is not None:
            await self._add_term(families, term)
        return families

    async def _add_term(self, families: Families, term: _Term) -> None:
        state, journal, outgoing = term
        self._meter.keep_to([p for p in state.pipelines.values() if p.live])
        self._meter.add_to(families)
        families.add(LEADER_EPOCH, state.leader_epoch)
        families.add(COMMANDS_PENDING, outgoing.num_pending)
        families.add(SNAPSHOT_LAG, max(0, state.sequence - journal.newest))
        families.add(SNAPSHOT_FAILED, journal.failure is not None)
        add_cluster(families, state)
        for pipeline in list(state.pipelines.values()):
            add_pipeline(families, pipeline)
            await asyncio.sleep(0)  # Folding must not wait for a large cluster's scrape.
        subjects = self._bus.subjects
        for fill in self._fills:
            families.add(STREAM_BYTES, fill.num_bytes, fill.stream)
            families.add(STREAM_LIMIT, fill.max_bytes, fill.stream)
            families.add(STREAM_MESSAGES, fill.num_messages, fill.stream)
            if fill.stream == subjects.dead_letters_stream().name:
                families.add(DEAD_LETTERS, fill.num_messages)
            if fill.stream == subjects.events_stream().name:
                families.add(FOLD_LAG, max(0, fill.last_sequence - state.sequence))

    async def _look_at_streams(self, state: State) -> None:
        if time.monotonic() - self._filled_s < STREAMS_PERIOD_S:
            return
        subjects = self._bus.subjects
        names = [spec.name for spec in subjects.cluster_streams()]
        for pipeline in state.pipelines.values():
            if pipeline.live:
                names.append(subjects.data_stream(pipeline.name).name)
                names.append(subjects.weights_stream(pipeline.name).name)
        self._fills = ()
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(STREAMS_TIMEOUT_S):
                fills = await asyncio.gather(*map(self._bus.fill, names))
            self._fills = tuple(fill for fill in fills if fill.max_bytes)
            self._filled_s = time.monotonic()
