"""The consumer loop of one boot's commands: ack after effect, repeats with backoff, dead letters.

Used by `client`. A failed command is tried again in this process while its later ones wait, so that
with concurrency 1 the order holds; the server redelivers only what was never acked.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig

from jigsawrl.bus.base import BusError, CommandHandler
from jigsawrl.bus.connection import (
    RETRYABLE,
    Backoff,
    BusClosedError,
    Connection,
    cancellation_kept,
    log,
)
from jigsawrl.bus.dead_letters import DeadLetters
from jigsawrl.bus.handling import outcome
from jigsawrl.bus.pulling import Puller, PullLostError, delivery_of
from jigsawrl.contract.codec import COMMANDS, UndecodableError
from jigsawrl.contract.message import Worker
from jigsawrl.tracing import Traces

STREAM_TIMEOUT_S = 20.0
"""A worker waits so long for the scheduler to make the streams."""

STREAM_POLL_S = 0.1

ACK_WAIT_S = 30.0
"""The server redelivers what is neither acked nor reported in progress for so long."""

IN_PROGRESS_INTERVAL_S = 5.0
"""In-progress acks for all commands in hand."""

INACTIVE_S = 600.0
"""The server forgets a boot that does not pull for so long, and its commands with it."""

RETRY_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
"""Before the second to fifth try; then the command is a dead letter."""

ACK_TIMEOUT_S = 2.0
"""An ack that is lost is repeated when the command comes again."""

PREFETCH = 16
"""Commands held beyond those that are being handled."""

NUM_REMEMBERED = 4096
"""Handled commands whose redelivery is acked without handling them again."""


def consumer_name(worker: Worker) -> str:
    """The durable consumer of one boot."""
    return f"commands-{worker.id}-{worker.boot}".replace(".", "~")


async def bind(connection: Connection, *, stream: str, worker: Worker, subject: str) -> None:
    """Make the boot's durable consumer; harmless where it exists.

    A worker may start before the scheduler has made the stream, so a missing one is waited for."""
    name = consumer_name(worker)
    config = ConsumerConfig(
        name=name,
        durable_name=name,
        filter_subject=subject,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=ACK_WAIT_S,
        max_ack_pending=1000,
        inactive_threshold=INACTIVE_S,
    )
    what = f"make the command consumer of {worker.id}"
    deadline = time.monotonic() + STREAM_TIMEOUT_S
    while True:
        try:
            await connection.call(what, lambda js: js.add_consumer(stream, config))
            return
        except nats.js.errors.NotFoundError as error:
            if time.monotonic() > deadline:
                raise BusError(
                    f"no stream {stream} after {STREAM_TIMEOUT_S:.0f} s: does a scheduler run?"
                ) from error
            await asyncio.sleep(STREAM_POLL_S)


class CommandLoop:
    """Handles one boot's commands until it is cancelled or the bus is closed."""

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        traces: Traces,
        handler: CommandHandler,
        *,
        stream: str,
        worker: Worker,
        concurrency: int,
    ) -> None:
        self._connection = connection
        self._dead_letters = dead_letters
        self._traces = traces
        self._handler = handler
        self._stream = stream
        self._worker = worker
        self._concurrency = concurrency
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._in_hand: dict[int, Msg] = {}
        self._handled: collections.deque[int] = collections.deque(maxlen=NUM_REMEMBERED)
        self._room = asyncio.Event()

    async def run(self) -> None:
        """Pull, handle, ack. Raises `BusError` where commands were lost."""
        lost: BusError | None = None
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._work()) for _ in range(self._concurrency)]
            tasks.append(group.create_task(self._report_progress()))
            try:
                await self._pull()
            except BusError as error:
                lost = error  # raised below: what is raised here would come out as a group
            for task in tasks:
                task.cancel()
        if lost is not None:
            raise lost

    async def _pull(self) -> None:
        backoff = Backoff()
        while not self._connection.closing:
            try:
                async with self._connection.attempt(4.0) as link:
                    await link.js.consumer_info(self._stream, consumer_name(self._worker))
                async with Puller(
                    self._connection,
                    link,
                    stream=self._stream,
                    consumer=consumer_name(self._worker),
                ) as puller:
                    backoff = Backoff()
                    while True:
                        await self._pull_once(puller)
            except BusClosedError:
                return
            except nats.js.errors.NotFoundError as error:
                # Commands went with it, and nobody will repeat them: only a new boot, which owns
                # nothing, is given everything again.
                raise BusError(
                    f"the command consumer of {self._worker.id} is gone, and commands with it: this"
                    " boot ends"
                ) from error
            except (*RETRYABLE, PullLostError, nats.errors.Error) as error:
                log.debug("commands of %s: binding anew: %s", self._worker.id, error)
            await backoff.pause()

    async def _pull_once(self, puller: Puller) -> None:
        num = self._concurrency + PREFETCH - len(self._in_hand)
        if num <= 0:
            self._room.clear()
            await self._room.wait()
            return
        for message in await puller.fetch(num):
            sequence = delivery_of(message).stream_sequence
            if sequence in self._handled:
                await _ack(message)
            elif sequence in self._in_hand:
                self._in_hand[sequence] = message
            else:
                self._in_hand[sequence] = message
                self._queue.put_nowait(sequence)

    async def _work(self) -> None:
        while True:
            sequence = await self._queue.get()
            await self._handle(sequence, self._in_hand[sequence])
            self._handled.append(sequence)
            await _ack(self._in_hand.pop(sequence))
            self._room.set()

    async def _handle(self, sequence: int, message: Msg) -> None:
        try:
            command = COMMANDS.decode(message.data)
        except UndecodableError as error:
            await self._bury(sequence, message, str(error))
            return
        for pause_s in (*RETRY_PAUSES_S, None):
            with self._traces.handling(command.id, message.headers, cause=command.cause):
                failure = await outcome(self._handler, command)
            if not isinstance(failure, Exception):
                return
            if pause_s is None:
                reason = f"{len(RETRY_PAUSES_S) + 1} failures, the last: {failure!r}"
                await self._bury(sequence, message, reason)
            else:
                log.warning("command %s failed, again in %g s: %r", command.id, pause_s, failure)
                await asyncio.sleep(pause_s)

    async def _bury(self, sequence: int, message: Msg, reason: str) -> None:
        await self._dead_letters.write(
            subject=message.subject,
            payload=message.data,
            reason=reason,
            stream=self._stream,
            sequence=sequence,
        )

    async def _report_progress(self) -> None:
        while True:
            await asyncio.sleep(IN_PROGRESS_INTERVAL_S)
            for message in list(self._in_hand.values()):
                with contextlib.suppress(*RETRYABLE, nats.errors.Error):
                    await message.in_progress()


async def _ack(message: Msg) -> None:
    with contextlib.suppress(*RETRYABLE, nats.errors.Error), cancellation_kept():
        await message.ack_sync(timeout=ACK_TIMEOUT_S)
