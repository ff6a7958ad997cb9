"""Commands on their way: in order for each worker, at once for different ones, never given up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import structlog

from jigsawrl.bus.base import Bus, MessageTooLargeError
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import PipelineCancelled
from jigsawrl.contract.message import Worker, message_id
from jigsawrl.core.state import State

log = structlog.get_logger()

MAX_PENDING = 2000
"""Above this the leader waits before it folds on."""


class Outgoing:
    """Sends for one leader; its tasks belong to `group`, so that a bug in one ends the leader."""

    def __init__(self, bus: Bus, group: asyncio.TaskGroup, state: State) -> None:
        self._bus = bus
        self._state = state
        self._group = group
        self._last: dict[Worker, asyncio.Task[None]] = {}
        self._pending: set[asyncio.Task[None]] = set()

    @property
    def num_pending(self) -> int:
        """Commands that are not acked yet."""
        return len(self._pending)

    async def send(self, commands: Iterable[Command]) -> None:
        """Start sending; returns at once unless too many wait for their acks."""
        for command in commands:
            before = self._last.get(command.worker)
            task = self._group.create_task(self._publish(command, before))
            self._last[command.worker] = task
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)
            task.add_done_callback(partial(self._forget, command.worker))
        if len(self._pending) > MAX_PENDING:
            await self.settle()

    async def settle(self) -> None:
        """Until everything given so far is acked."""
        if self._pending:
            await asyncio.wait(set(self._pending))

    def _forget(self, worker: Worker, done: asyncio.Task[None]) -> None:
        if self._last.get(worker) is done:
            del self._last[worker]

    async def _publish(self, command: Command, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        try:
            await self._bus.publish_command(command)
        except MessageTooLargeError as error:
            # Nothing smaller would be right: the pipeline can't go on with this configuration.
            log.error("a command does not fit into a message", command=command.id, error=str(error))
            pipeline = command.worker.id.partition(".")[0]
            reason = f"{command.tag()}: {error}"
            known = self._state.pipelines.get(pipeline)
            cancelled = PipelineCancelled(
                id=message_id("too_large", command.id),
                pipeline=pipeline,
                reason=reason,
                submission=known.submissions[-1] if known and known.submissions else None,
            )
            await self._bus.publish_event(cancelled)
