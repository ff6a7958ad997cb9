"""What outlives a leader: its snapshots on the bus, and the event stream and snapshots on disk.

The leader notes every message it reads and hands over snapshots; what they make needless is archived in
segment files and purged from the event stream. Files are written on a thread: an fsync on the event
loop could outlast the leader's lease. A disk that takes no more is logged and costs no run: nothing is
purged then that is not archived. It knows nothing of what messages mean.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from jigsawrl.bus.base import Bus, BusError, StoredEvent
from services.scheduler.segments import Entry, last_written, write_segment
from services.scheduler.snapshots import (
    Snapshot,
    encode_snapshot,
    newest,
    stored_sequences,
    write_snapshot,
)

log = structlog.get_logger()

FULL_SHARE = 0.9
"""From here on room is made in the event stream: a tenth of it is more than the largest message."""


class Journal:
    """Kept by one leader."""

    def __init__(self, bus: Bus, *, folder: Path) -> None:
        self._bus = bus
        self._stream = bus.subjects.events_stream().name
        self._segments, self._snapshots = folder / "events", folder / "snapshots"
        self._entries: list[Entry] = []
        """Noted, not yet in a segment file."""
        self._written = last_written(self._segments)
        self._noted = self._written
        self._stored: list[int] = []
        """Sequences of the last two snapshots on the bus, the newest last."""
        self._writing = asyncio.Lock()
        self.failure: str | None = None
        """What the last snapshot failed at: until the next one, restarts take longer and the event
        stream fills up."""

    @property
    def newest(self) -> int:
        """Sequence of the newest snapshot on the bus; 0 where there is none."""
        return self._stored[-1] if self._stored else 0

    @property
    def written(self) -> int:
        """Last message on disk: what comes after it must be noted."""
        return self._written

    def note(self, stored: StoredEvent) -> None:
        """Keep a message until it is archived."""
        if stored.sequence > self._noted:
            self._noted = stored.sequence
            entry = Entry(stored.sequence, stored.timestamp_s, stored.payload)
            self._entries.append(entry)

    async def load(self) -> Snapshot | None:
        """The snapshot to lead on from; see `newest`."""
        payloads = await self._bus.load_snapshots()
        self._stored = stored_sequences(payloads)
        return newest(payloads)

    async def save(self, snapshot: Snapshot) -> None:
        """Store a snapshot, whose commands are acked; then purge before the last but one."""
        try:
            payload = await asyncio.to_thread(encode_snapshot, snapshot)
            await self._bus.save_snapshot(payload)
        except BusError as error:
            log.warning("goes on without a new snapshot", error=str(error))
            self.failure = f"a snapshot of the scheduler, the last of which failed: {error}"
            return
        self.failure = None
        self._stored = [*self._stored, snapshot.sequence][-2:]
        try:
            await asyncio.to_thread(
                write_snapshot, self._snapshots, sequence=snapshot.sequence, payload=payload
            )
        except OSError as error:
            log.warning("a snapshot is missing on disk, for replay", error=str(error))
            self.failure = f"the disk that holds the scheduler's snapshots: {error}"
        if len(self._stored) == 2:
            await self._purge(self._stored[0])

    async def make_room(self) -> bool:
        """Where the event stream is nearly full, purge what the stored snapshots make needless: up to
        the last but one, and where that frees too little, up to the newest. Whether it still is."""
        for last in self._stored:
            if not await self._is_full():
                return False
            await self._purge(last)
        return await self._is_full()

    async def close(self) -> None:
        """Archive the rest."""
        await self._archive(self._noted)

    async def _is_full(self) -> bool:
        fill = await self._bus.fill(self._stream)
        return fill.num_bytes > FULL_SHARE * fill.max_bytes > 0

    async def _purge(self, last: int) -> None:
        """Remove the messages up to `last` from the event stream, once they are archived."""
        if last == 0 or not await self._archive(last):
            return
        try:
            await self._bus.purge(self._stream, before=last + 1)
        except BusError as error:
            log.warning("could not purge the event stream", error=str(error))

    async def _archive(self, last: int) -> bool:
        """Whether the messages up to `last` are on disk now."""
        async with self._writing:
            done = [entry for entry in self._entries if entry.sequence <= last]
            try:
                await asyncio.to_thread(write_segment, self._segments, done)
            except OSError as error:
                log.warning("keeps messages that it can't archive", error=str(error))
                self.failure = f"the disk that holds the scheduler's segment files: {error}"
                return False
            self._entries = self._entries[len(done) :]
            self._written = max(self._written, done[-1].sequence if done else 0)
            return self._noted >= last
