"""Stores messages on streams: size checked first, repeated only under the same id.

Used by `client`. A time-out says nothing about whether the message was stored, therefore every try
carries the same ``Nats-Msg-Id`` (the message's id): within the stream's duplicate window the server
stores it once. After a longer outage it may be stored twice; folds are idempotent for that reason. A
``traceparent`` goes with it, made of the same id (`jigsawrl.tracing`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js.api import PubAck

from jigsawrl.bus.base import BusError, MessageTooLargeError, StreamFullError
from jigsawrl.bus.connection import RETRYABLE, Backoff, Connection, describe, is_lack_of_room, log
from jigsawrl.tracing import Traces

PUBLISH_TIMEOUT_S = 5.0
"""One try; a loaded server acks 8 MB in well under a second."""

NO_STREAM_DEADLINE_S = 20.0
"""For so long a connected server may answer that no stream takes the subject (it recovers its
streams after a restart); then the stream does not exist."""

REMINDER_INTERVAL_S = 10.0
"""A publisher that waits says so this often."""

MESSAGE_ID = "Nats-Msg-Id"

_HEADER_START_BYTES = len(b"NATS/1.0\r\n") + len(b"\r\n")


def header_bytes(headers: dict[str, str]) -> int:
    """Size of the headers on the wire; they count against the server's ``max_payload``."""
    return _HEADER_START_BYTES + sum(
        len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items()
    )


def check_size(
    client: Client, subject: str, payload: bytes, headers: dict[str, str] | None = None
) -> None:
    """Raise `MessageTooLargeError` for what the server would answer by closing the connection.

    nats-py looks at the payload only."""
    num_bytes = len(payload) + (header_bytes(headers) if headers else 0)
    if num_bytes > client.max_payload:
        raise MessageTooLargeError(
            f"message on {subject} has {num_bytes} bytes with headers, the server takes"
            f" {client.max_payload}: make it smaller or raise max_payload"
        )


class Publisher:
    """Stores messages and knows whether any are on their way."""

    def __init__(self, connection: Connection, traces: Traces) -> None:
        self._connection = connection
        self._traces = traces
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def store(
        self,
        subject: str,
        payload: bytes,
        message_id: str,
        *,
        cause: str = "",
        wait_when_full: bool = True,
    ) -> int:
        """The stream sequence of the stored message.

        Raises `MessageTooLargeError`, `BusError` where no stream takes the subject, and
        `StreamFullError` unless `wait_when_full`."""
        headers = self._headers(message_id, cause)
        return (await self._store(subject, payload, headers, wait=wait_when_full)).seq

    async def store_last(
        self, subject: str, payload: bytes, message_id: str, *, cause: str = ""
    ) -> int:
        """As `store` without waiting, and the message is then the last one on its subject.

        The server takes a message for a repeat even where the first one has been purged or
        superseded since; it is stored again then, under an id of its own."""
        headers = self._headers(message_id, cause)
        ack = await self._store(subject, payload, headers, wait=False)
        if ack.duplicate and await self._last_sequence(ack.stream, subject) != ack.seq:
            headers |= {MESSAGE_ID: f"{message_id}:{uuid.uuid4()}"}
            ack = await self._store(subject, payload, headers, wait=False)
        return ack.seq

    def _headers(self, message_id: str, cause: str) -> dict[str, str]:
        return {MESSAGE_ID: message_id} | self._traces.headers(message_id, cause=cause)

    async def _last_sequence(self, stream: str, subject: str) -> int | None:
        try:
            message = await self._connection.call(
                f"look at {subject}", lambda js: js.get_last_msg(stream, subject, direct=True)
            )
        except nats.js.errors.NotFoundError:
            return None
        return message.seq

    async def _store(
        self, subject: str, payload: bytes, headers: dict[str, str], *, wait: bool
    ) -> PubAck:
        backoff = Backoff()
        reminder = _Reminder(subject)
        no_stream_since_s: float | None = None
        with self._in_flight():
            while True:
                try:
                    async with self._connection.attempt(PUBLISH_TIMEOUT_S + 1) as link:
                        check_size(link.client, subject, payload, headers)
                        return await link.js.publish(
                            subject, payload, timeout=PUBLISH_TIMEOUT_S, headers=headers
                        )
                except nats.js.errors.NoStreamResponseError as error:
                    no_stream_since_s = no_stream_since_s or time.monotonic()
                    if time.monotonic() - no_stream_since_s > NO_STREAM_DEADLINE_S:
                        raise BusError(f"no stream takes {subject}: was it deleted?") from error
                    reminder.waits("no stream answers")
                except nats.errors.BadSubjectError as error:
                    raise BusError(f"{subject!r} is no subject to store on") from error
                except (*RETRYABLE, nats.js.errors.APIError) as error:
                    no_stream_since_s = None
                    if is_lack_of_room(error):
                        if not wait:
                            raise StreamFullError(f"{subject}: {describe(error)}") from error
                    elif not isinstance(error, RETRYABLE):
                        raise BusError(f"can't store on {subject}: {describe(error)}") from error
                    reminder.waits(describe(error))
                await backoff.pause()

    async def finish(self, timeout_s: float) -> None:
        """Wait for what is being stored, `timeout_s` at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    @contextlib.contextmanager
    def _in_flight(self) -> Iterator[None]:
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()


class _Reminder:
    """Says what a publisher waits for, now and then."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._started_s = time.monotonic()
        self._said_s = self._started_s

    def waits(self, reason: str) -> None:
        now = time.monotonic()
        if now - self._said_s >= REMINDER_INTERVAL_S:
            self._said_s = now
            waited_s = now - self._started_s
            log.warning("waiting to store on %s since %.0f s: %s", self._subject, waited_s, reason)
