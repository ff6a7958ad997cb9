"""Pull requests to one JetStream consumer, message by message as they arrive.

Used by `reading` and `commands`. It replaces nats-py's ``fetch``, which holds a live message back
until the batch is full or the time is over, and may sit on an orphaned request: here the server's
idle heartbeats bound every wait, and silence is an error that the caller answers by binding anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from types import TracebackType

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from jigsawrl.bus.connection import Connection, Link

EXPIRES_S = 5.0
"""Life of one pull request on the server."""

HEARTBEAT_S = 1.0
"""The server says so often that a pull request is alive; at most half of `EXPIRES_S`."""

SILENCE_S = 3.0
"""No message and no heartbeat for so long: the request is lost."""

PENDING_BYTES_LIMIT = 256 * 1024 * 1024
"""Of one subscription; every caller's batch times its largest message stays below."""


class PullLostError(Exception):
    """The consumer or the request is gone or silent; bind anew."""


@dataclass(frozen=True)
class Delivery:
    """What the reply subject of a JetStream message says."""

    stream_sequence: int
    consumer_sequence: int
    num_pending: int
    timestamp_s: float


def delivery_of(message: Msg) -> Delivery:
    """Parse ``$JS.ACK.…``: 9 tokens, or 11 and more with domain and account."""
    tokens = message.reply.split(".")
    start = 5 if len(tokens) == 9 else 7
    stream, consumer, timestamp_ns, pending = (int(token) for token in tokens[start : start + 4])
    return Delivery(stream, consumer, pending, timestamp_ns / 1e9)


class Puller:
    """An inbox for one consumer; use as an async context manager."""

    def __init__(self, connection: Connection, link: Link, *, stream: str, consumer: str) -> None:
        self._connection = connection
        self._generation = link.generation
        self._client: Client = link.client
        self._inbox = link.client.new_inbox()
        self._request = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._subscription: Subscription | None = None
        self._arrived: list[Msg] = []
        self._num_requested = 0
        self._lost: str | None = None
        self._event = asyncio.Event()
        self._listening = connection.listening(self._event)

    async def __aenter__(self) -> Puller:
        self._subscription = await self._client.subscribe(
            self._inbox, cb=self._on_message, pending_bytes_limit=PENDING_BYTES_LIMIT
        )
        self._listening.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._listening.__exit__(None, None, None)
        assert self._subscription is not None
        with contextlib.suppress(nats.errors.Error, OSError):
            await self._subscription.unsubscribe()

    async def fetch(self, num: int) -> list[Msg]:
        """Messages that arrived, at most `num` requested at a time; empty on a heartbeat.

        Raises `PullLostError`, and `PermissionDeniedError` where the server does not let us pull."""
        if not self._arrived and self._num_requested <= 0:
            await self._send_request(num)
        try:
            async with asyncio.timeout(SILENCE_S):
                await self._event.wait()
        except TimeoutError:
            raise PullLostError(f"no sign of life for {SILENCE_S:g} s") from None
        self._event.clear()
        arrived, self._arrived = self._arrived, []
        if not arrived:
            self._connection.denials.check(self._request)
            if self._connection.generation != self._generation:
                raise PullLostError("the connection changed")
            if self._lost is not None:
                raise PullLostError(self._lost)
        elif self._lost is not None:
            self._event.set()
        return arrived

    async def _send_request(self, num: int) -> None:
        request = {
            "batch": num,
            "expires": int(EXPIRES_S * 1e9),
            "idle_heartbeat": int(HEARTBEAT_S * 1e9),
        }
        self._num_requested = num
        self._connection.denials.forget_subject(self._request)
        await self._client.publish(self._request, json.dumps(request).encode(), self._inbox)

    async def _on_message(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK."):
            self._num_requested -= 1
            self._arrived.append(message)
        else:
            status = (message.headers or {}).get("Status", "")
            if status in ("404", "408"):
                self._num_requested = 0
            elif status != "100":
                description = (message.headers or {}).get("Description", "no responders")
                self._lost = f"{status} {description}"
        self._event.set()
