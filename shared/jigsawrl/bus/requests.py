"""Requests and replies, and telemetry, over core NATS: what may be lost is asked again or missed.

Used by `client`. Nothing here is stored.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jigsawrl.bus.base import BusError, MessageTooLargeError, NoAnswerError, RequestHandler
from jigsawrl.bus.connection import (
    RETRYABLE,
    Backoff,
    BusClosedError,
    Connection,
    Link,
    describe,
    log,
)
from jigsawrl.bus.dead_letters import DeadLetters
from jigsawrl.bus.handling import outcome
from jigsawrl.bus.publishing import check_size
from jigsawrl.contract.codec import REPLIES, REQUESTS, TELEMETRY, UndecodableError, encode
from jigsawrl.contract.message import Message, message_id
from jigsawrl.contract.requests import Activity, RequestRefused
from jigsawrl.tracing import Traces

PENDING_BYTES_LIMIT = 128 * 1024 * 1024
"""Of a core subscription; beyond it nats-py drops messages and the connection raises the alarm."""

TELEMETRY_QUEUE = 256
"""Activities kept while the connection is away; older ones are dropped."""

NUM_TRIES = 3
"""A request is asked again after a third of its time, in case its answer was lost."""


async def request(
    connection: Connection, traces: Traces, subject: str, message: Message, *, timeout_s: float
) -> Any:
    """See `Bus.request`."""
    payload = encode(message)
    headers = traces.headers(message.id, cause=message.cause)
    deadline = time.monotonic() + timeout_s
    backoff = Backoff(longest_s=0.25)
    problem, is_served = "no answer", False
    try_s = max(timeout_s / NUM_TRIES, 0.5)
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left_s), connection.attempt(left_s) as link:
                check_size(link.client, subject, payload, headers)
                answer = await link.client.request(
                    subject, payload, timeout=min(left_s, try_s), headers=headers
                )
            return _reply(subject, answer.data)
        except RETRYABLE as error:
            problem = describe(error)
            # A try that the deadline cut short says nothing of who is there.
            if not isinstance(error, nats.errors.TimeoutError):
                is_served = is_served and isinstance(error, TimeoutError)
            elif left_s >= try_s:
                is_served = True
        await backoff.pause()
    raise NoAnswerError(
        f"no answer on {subject} within {timeout_s:g} s ({problem}): is the service running?",
        is_served=is_served,
    )


def _reply(subject: str, payload: bytes) -> Any:
    try:
        reply = REPLIES.decode(payload)
    except UndecodableError as error:
        raise BusError(f"the answer on {subject} can't be read: {error}") from error
    if isinstance(reply, RequestRefused):
        raise BusError(reply.reason)
    return reply


class RequestServer:
    """Answers the requests to one target, some at a time."""

    def __init__(
        self,
        connection: Connection,
        dead_letters: DeadLetters,
        traces: Traces,
        handler: RequestHandler,
        *,
        subject: str,
        concurrency: int,
        shared: bool,
    ) -> None:
        self._connection = connection
        self._dead_letters = dead_letters
        self._traces = traces
        self._handler = handler
        self._subject = subject
        self._queue = subject if shared else ""
        self._free = asyncio.Semaphore(concurrency)

    async def run(self) -> None:
        """Until cancelled or the bus is closed."""
        async with asyncio.TaskGroup() as group:

            async def on_message(message: Msg) -> None:
                if not message.reply:  # a plain publish: nobody waits for an answer
                    await self._dead_letters.write(
                        subject=message.subject, payload=message.data, reason="no reply subject"
                    )
                    return
                await self._free.acquire()
                group.create_task(self._answer(message))

            while not self._connection.closing:
                with contextlib.suppress(*RETRYABLE, BusClosedError):
                    link = await self._connection.ready()
                    subscription = await link.client.subscribe(
                        self._subject,
                        queue=self._queue,
                        cb=on_message,
                        pending_bytes_limit=PENDING_BYTES_LIMIT,
                    )
                    async with _ending(subscription):
                        await self._connection.subscribed(link, self._subject)
                        await self._connection.replaced(link)

    async def _answer(self, message: Msg) -> None:
        try:
            reply = await self._reply_to(message)
            payload, headers = encode(reply), self._traces.headers(reply.id, cause=reply.cause)
            with contextlib.suppress(*RETRYABLE, nats.errors.Error):
                link = await self._connection.ready()
                try:
                    check_size(link.client, message.reply, payload, headers)
                except MessageTooLargeError as error:
                    payload = encode(_refusal(message, str(error)))
                await link.client.publish(message.reply, payload, headers=headers)
        except BusClosedError:
            return
        finally:
            self._free.release()

    async def _reply_to(self, message: Msg) -> Message:
        try:
            asked = REQUESTS.decode(message.data)
        except UndecodableError as error:
            await self._dead_letters.write(
                subject=message.subject, payload=message.data, reason=str(error)
            )
            return _refusal(message, f"the request can't be read: {error}")
        with self._traces.handling(asked.id, message.headers, cause=asked.cause):
            result = await outcome(self._handler, asked)
        if isinstance(result, Exception):
            return _refusal(message, str(result) or repr(result), cause=asked.id)
        return result


def _refusal(message: Msg, reason: str, *, cause: str = "") -> RequestRefused:
    return RequestRefused(
        id=message_id(RequestRefused.tag(), message.reply), cause=cause, reason=reason
    )


class TelemetrySender:
    """Sends activities from a short queue, so that who reports never waits."""

    def __init__(self, connection: Connection, traces: Traces) -> None:
        self._connection = connection
        self._traces = traces
        self._queue: collections.deque[tuple[str, bytes, dict[str, str]]] = collections.deque(
            maxlen=TELEMETRY_QUEUE
        )
        self._filled = asyncio.Event()

    def put(self, subject: str, activity: Activity) -> None:
        """Queue one activity; the oldest makes room."""
        headers = self._traces.headers(activity.id, cause=activity.cause)
        self._queue.append((subject, encode(activity), headers))
        self._filled.set()

    async def run(self) -> None:
        """Until cancelled or the bus is closed."""
        with contextlib.suppress(BusClosedError):
            while True:
                await self._filled.wait()
                self._filled.clear()
                while self._queue:
                    link = await self._connection.ready()
                    await self._send(link, *self._queue.popleft())

    async def _send(
        self, link: Link, subject: str, payload: bytes, headers: dict[str, str]
    ) -> None:
        try:
            check_size(link.client, subject, payload, headers)
            await link.client.publish(subject, payload, headers=headers)
        except MessageTooLargeError as error:
            log.warning("telemetry dropped: %s", error)
        except (*RETRYABLE, nats.errors.Error) as error:
            log.debug("telemetry dropped: %s", error)


async def watch_activities(
    connection: Connection, dead_letters: DeadLetters, *, subject: str
) -> AsyncIterator[Activity]:
    """See `Bus.watch_activities`."""
    arrived: collections.deque[Msg] = collections.deque(maxlen=TELEMETRY_QUEUE)
    event = asyncio.Event()

    async def on_message(message: Msg) -> None:
        arrived.append(message)
        event.set()

    while not connection.closing:
        with contextlib.suppress(*RETRYABLE, BusClosedError):
            link = await connection.ready()
            subscription = await link.client.subscribe(subject, cb=on_message)
            async with _ending(subscription):
                await connection.subscribed(link, subject)
                with connection.listening(event):
                    while link.generation == connection.generation:
                        await event.wait()
                        event.clear()
                        while arrived:
                            message = arrived.popleft()
                            activity = await _activity(dead_letters, message)
                            if activity is not None:
                                yield activity


async def _activity(dead_letters: DeadLetters, message: Msg) -> Activity | None:
    try:
        activity: Activity = TELEMETRY.decode(message.data)
    except UndecodableError as error:
        await dead_letters.write(subject=message.subject, payload=message.data, reason=str(error))
        return None
    return activity


@contextlib.asynccontextmanager
async def _ending(subscription: Subscription) -> AsyncIterator[None]:
    """Unsubscribe at the end, whatever state the client is in."""
    try:
        yield
    finally:
        with contextlib.suppress(nats.errors.Error, OSError):
            await subscription.unsubscribe()
