"""The leader's loop: events in, decisions by the core, commands out; ticks, and when snapshots are due.

It decides nothing. It takes over at the newest snapshot, folds what is stored without publishing,
publishes `LeaderElected`, folds up to it, sends again whatever earlier messages caused, under the old
ids, and stores a snapshot before it goes on. It stops when it reads another's `LeaderElected`, or in
order when told, with a snapshot that hands over. Who led last, and with which version of the code, is
what the newest snapshot and the elections behind it say.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeAlias

import structlog

from jigsawrl import __version__
from jigsawrl.bus.base import Bus, BusError, StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import CheckpointCommitted, LeaderElected, Tick
from jigsawrl.contract.message import message_id
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.core.history import data_needed_from
from jigsawrl.core.policies import DEFAULT_POLICY
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.journal import Journal
from services.scheduler.newcomers import Newcomers
from services.scheduler.outgoing import Outgoing
from services.scheduler.requests import Requests
from services.scheduler.snapshots import Snapshot, check_version
from services.scheduler.watching import Watch, is_ignored

log = structlog.get_logger()

TICK_S = 0.1
IDLE_TICK_S = 0.5
"""Where no pipeline lives. Well under the 1 s from which on a silence counts as an absence of NATS or
the leader and restarts all leases (`core.clock`): else nobody would notice a dead node."""

DECISION_S = 0.02
"""A tick follows a marked pipeline this soon, if nothing else does."""

SNAPSHOT_EVENTS = 10_000
SNAPSHOT_S = 60.0
SNAPSHOT_HANDLING_S = 2.0
"""A snapshot is due after so many events, so long, or so much handling: what a restart repeats."""

ROOM_S = 1.0
"""How often the leader looks whether a snapshot is due or the event stream full, whatever it reads."""

YIELD_EVENTS = 100
"""Events folded in a row before other tasks of the process get a turn."""


Folded: TypeAlias = tuple[StoredEvent, list[Command]]
"""A message, and the commands that it led to."""


class DeposedError(Exception):
    """Another leads."""


class Leader:
    """Leads from construction of the scheduler until deposed or cancelled."""

    def __init__(
        self,
        bus: Bus,
        *,
        holder: str,
        folder: Path,
        policy: str = DEFAULT_POLICY,
        profile: DeviceProfile | None = None,
        snapshot_events: int = SNAPSHOT_EVENTS,
        watches: Sequence[Watch] = (),
    ) -> None:
        self._bus = bus
        self._watches = watches
        self._snapshot_events = snapshot_events
        self._holder = holder
        self._policy, self._profile = policy, profile
        self._term = f"{holder}-{uuid.uuid4().hex[:8]}"
        """Part of the ids of what it publishes: a process may lead twice within the time in which the
        server takes a repeated id for a repeated message."""
        self._journal = Journal(bus, folder=folder)
        self._newcomers = Newcomers()
        self._last = 0
        """Last message folded, or passed over as unreadable."""
        self._epoch: int | None = None
        self._alike = True
        """What it takes over is of its own version: until its election or snapshot binds to that, it
        may send nothing that another version might have decided otherwise."""
        self._decision_due = asyncio.Event()
        self._ticks = itertools.count()
        self._snapshot_s = time.monotonic()
        self._handling_s = 0.0
        self._num_since_snapshot = 0
        self._saving: asyncio.Task[None] | None = None
        self._stopping = False
        self._leading: list[asyncio.Task[None]] = []
        """What goes on while it leads, beside the loop."""

    def stop(self) -> None:
        """End after the message that is read next, a tick at the latest, and hand over."""
        self._stopping = True

    async def lead(self) -> None:
        """Until stopped; raises `DeposedError`, or `BusError` where the bus can't go on."""
        scheduler = await self._restore()
        # A full collection walks the whole state, in the middle of a decision: garbage is collected
        # with snapshots, which walk it anyway. Reference counts free all but cycles at once.
        gc.disable()
        ended: DeposedError | BusError | None = None
        try:
            async with asyncio.TaskGroup() as group:
                await self._run(scheduler, group)
        except* DeposedError:
            ended = DeposedError()  # Raised below: what is raised here would come out as a group.
        except* BusError as errors:
            ended = BusError("; ".join(str(error) for error in errors.exceptions))
        finally:
            gc.enable()
            for watch in self._watches:
                watch.ended()
            await self._journal.close()
        if ended is not None:
            raise ended

    async def _restore(self) -> Scheduler:
        snapshot = await self._journal.load()
        if snapshot is None:
            return Scheduler()
        self._last, self._alike = snapshot.sequence, snapshot.code_version == __version__
        try:
            return Scheduler.restore(snapshot.state)
        except ValueError as error:
            raise BusError(
                f"the snapshot of message {snapshot.sequence}, of version {snapshot.code_version}:"
                f" {error}"
            ) from error

    async def _run(self, scheduler: Scheduler, group: asyncio.TaskGroup) -> None:
        outgoing = Outgoing(self._bus, group, scheduler.state)
        reading = self._read(scheduler)
        repeated = await self._catch_up(reading)
        if await self._journal.make_room() and self._alike:
            # No snapshot covers enough of it. Nobody can be elected before one does, and what it needs
            # are the commands of earlier leaders only, which come out the same, byte for byte.
            await outgoing.send(repeated)
            await self._save(self._snapshot(scheduler), outgoing)
            repeated = []
            await self._journal.make_room()
        epoch = self._epoch = await self._elect()
        async for stored, commands in reading:
            if stored.sequence < epoch:
                repeated += commands
            elif stored.sequence == epoch:
                log.info("leads", epoch=epoch, num_repeated=len(repeated))
                await outgoing.send([*repeated, *commands])
                await self._save(self._snapshot(scheduler), outgoing)
                self._start(scheduler, outgoing, group)
            else:
                await outgoing.send(commands)
                await self._after(scheduler, stored, outgoing, group)
                if self._stopping:
                    break
        for task in self._leading:
            task.cancel()
        if self._saving is not None:
            await self._saving
        await self._save(self._snapshot(scheduler, handed_over=True), outgoing)

    async def _catch_up(self, reading: AsyncIterator[Folded]) -> list[Command]:
        """Read what is stored now; the commands that it led to. What keeps this process from leading
        comes out before it is elected: an election binds the next leader to its version."""
        stored = await self._bus.fill(self._bus.subjects.events_stream().name)
        end = stored.last_sequence
        if end < self._last:
            raise BusError(
                f"the event stream ends at {end}, but the newest snapshot is of {self._last}: the"
                " stream was deleted; delete the snapshots, too, to begin anew"
            )
        repeated: list[Command] = []
        if not stored.num_messages:
            self._check_complete(end + 1)
        elif min(self._journal.written, self._last) < end:
            async for message, commands in reading:
                repeated += commands
                if message.sequence >= end:
                    break
        return repeated

    async def _elect(self) -> int:
        elected = LeaderElected(
            id=message_id(LeaderElected.tag(), self._term),
            leader=self._holder,
            code_version=__version__,
            policy=self._policy,
            profile=self._profile,
        )
        return await self._bus.publish_event(elected)

    async def _read(self, scheduler: Scheduler) -> AsyncIterator[Folded]:
        """Each message that is not archived; folded, if behind the snapshot, with the commands that
        it led to."""
        folded = self._last
        async for stored in self._bus.read_events(after=min(self._journal.written, folded)):
            self._journal.note(stored)
            if stored.sequence <= folded:
                yield stored, []
            else:
                self._check_complete(stored.sequence)
                self._last = stored.sequence
                yield stored, self._fold(scheduler, stored)
            if stored.sequence % YIELD_EVENTS == 0:
                await asyncio.sleep(0)

    def _check_complete(self, sequence: int) -> None:
        """Nothing is missing since the last message."""
        if sequence == self._last + 1:
            return
        if self._epoch is not None and sequence > self._epoch:
            raise DeposedError  # Only a leader purges: another did, while this one was frozen.
        raise BusError(
            f"the event stream lacks messages {self._last + 1} to {sequence - 1}, which follow the"
            " newest snapshot: it was purged by hand; delete the snapshots, too, to begin anew"
        )

    def _start(self, scheduler: Scheduler, outgoing: Outgoing, group: asyncio.TaskGroup) -> None:
        requests = Requests(self._bus, scheduler, self._journal)
        self._leading = [
            group.create_task(self._bus.serve("scheduler", requests.handle, shared=False)),
            group.create_task(self._bus.serve("status", requests.tell, shared=False)),
            group.create_task(self._tick(scheduler)),
            group.create_task(self._keep_room(scheduler, outgoing, group)),
        ]
        for watch in self._watches:
            watch.leads(scheduler.state, self._journal, outgoing)

    def _fold(self, scheduler: Scheduler, stored: StoredEvent) -> list[Command]:
        event = stored.event
        if event is None:
            return []
        if isinstance(event, LeaderElected):
            if self._epoch is not None and stored.sequence > self._epoch:
                raise DeposedError
            check_version(event.code_version)
        decided_s, started_s = scheduler.state.decided_s, time.perf_counter()
        num_ignored = scheduler.state.num_ignored
        commands = scheduler.handle(event, timestamp_s=stored.timestamp_s, sequence=stored.sequence)
        taken_s = time.perf_counter() - started_s
        self._handling_s += taken_s
        if self._epoch is not None and stored.sequence > self._epoch:
            decided = scheduler.state.decided_s != decided_s
            ignored = is_ignored(event, num_ignored=scheduler.state.num_ignored - num_ignored)
            for watch in self._watches:
                watch.folded(stored, commands, taken_s=taken_s, decided=decided, ignored=ignored)
        self._num_since_snapshot += 1
        self._newcomers.look(scheduler.state, event)
        if scheduler.decision_due:
            self._decision_due.set()
        else:
            self._decision_due.clear()
        return commands

    async def _tick(self, scheduler: Scheduler) -> None:
        loop = asyncio.get_running_loop()
        last_s = loop.time()
        while True:
            due = await self._decision_stays_due(until_s=loop.time() + TICK_S)
            live = any(p.live for p in scheduler.state.pipelines.values())
            if not due and not live and loop.time() - last_s < IDLE_TICK_S:
                continue
            last_s = loop.time()
            tick_id = message_id(Tick.tag(), self._term, next(self._ticks))
            await self._bus.publish_event(Tick(id=tick_id))

    async def _decision_stays_due(self, *, until_s: float) -> bool:
        """True once a decision was due for as long as it may wait; False at the deadline: decisions
        that other events bring must not put off the tick, on which every lease depends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while True:
                    await self._decision_due.wait()
                    await asyncio.sleep(DECISION_S)
                    if self._decision_due.is_set():
                        return True
        return False

    # --- After an event --------------------------------------------------------------------------

    async def _after(
        self,
        scheduler: Scheduler,
        stored: StoredEvent,
        outgoing: Outgoing,
        group: asyncio.TaskGroup,
    ) -> None:
        event = stored.event
        if isinstance(event, CheckpointCommitted) and event.pipeline is not None:
            group.create_task(self._purge_data(scheduler, event.pipeline))
        if self._snapshot_due:
            self._start_saving(scheduler, outgoing, group)

    async def _keep_room(
        self, scheduler: Scheduler, outgoing: Outgoing, group: asyncio.TaskGroup
    ) -> None:
        """Snapshots and room do not depend on events: a full stream takes none."""
        while True:
            await asyncio.sleep(ROOM_S)
            try:
                full = await self._journal.make_room()
            except BusError as error:
                log.warning("could not look at the event stream", error=str(error))
                continue
            if self._snapshot_due or (full and self._last > self._journal.newest):
                self._start_saving(scheduler, outgoing, group)

    @property
    def _snapshot_due(self) -> bool:
        return (
            self._num_since_snapshot >= self._snapshot_events
            or self._handling_s >= SNAPSHOT_HANDLING_S
            or time.monotonic() - self._snapshot_s >= SNAPSHOT_S
        )

    def _start_saving(
        self, scheduler: Scheduler, outgoing: Outgoing, group: asyncio.TaskGroup
    ) -> None:
        if self._saving is None or self._saving.done():
            self._saving = group.create_task(self._save(self._snapshot(scheduler), outgoing))
            self._num_since_snapshot, self._handling_s = 0, 0.0
            self._snapshot_s = time.monotonic()

    def _snapshot(self, scheduler: Scheduler, *, handed_over: bool = False) -> Snapshot:
        gc.collect()
        return Snapshot(
            sequence=self._last,
            code_version=__version__,
            state=scheduler.snapshot(),
            handed_over=handed_over,
        )

    async def _save(self, snapshot: Snapshot, outgoing: Outgoing) -> None:
        """Store a snapshot once every command before it is acked."""
        await outgoing.settle()
        await self._journal.save(snapshot)

    async def _purge_data(self, scheduler: Scheduler, name: str) -> None:
        pipeline = scheduler.state.pipelines.get(name)
        if pipeline is None or not pipeline.live:
            return
        stream = self._bus.subjects.data_stream(name).name
        try:
            await self._bus.purge(stream, before=data_needed_from(pipeline))
        except BusError as error:
            log.warning("could not purge covered records", pipeline=name, error=str(error))
