"""One supervised connection to NATS: it comes back whatever happens to the server or the client.

Used by the other files of this package, never by services. It knows nothing of messages.

nats-py 2.16 needs this care: a protocol error closes its client for good, a reading task that died
leaves a client that looks connected, pings notice a silent peer late, and a drain may take 30 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.js import JetStreamContext

from jigsawrl.bus.base import BusError
from jigsawrl.bus.credentials import Credentials, refusal
from jigsawrl.bus.denials import Denials, is_denial
from jigsawrl.bus.opening import CLOSE_TIMEOUT_S, abort, check_url, discard, open_client

log = logging.getLogger("jigsawrl.bus")

T = TypeVar("T")

WATCH_INTERVAL_S = 2.0
"""Between two round trips of the watchdog."""

ROUND_TRIP_TIMEOUT_S = 4
"""A peer that is silent for longer is left; a busy machine may well take a second."""

RECONNECT_PATIENCE_S = 10.0
"""A client that has not reconnected by itself for so long is replaced by a new one."""

OPEN_TIMEOUT_S = 10.0
"""One try to connect: a peer that takes the connection and is silent then (its process is frozen, the
network was cut just now) would be waited for by TLS for a minute."""

REMINDER_S = 3.0
"""A server that can't be reached for so long is worth a line."""

CALL_TIMEOUT_S = 3.0
"""One try of a JetStream API call."""

CALL_DEADLINE_S = 30.0
"""All tries of a JetStream API call together."""

RETRYABLE = (
    TimeoutError,
    OSError,
    nats.errors.TimeoutError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionDrainingError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    nats.errors.NoRespondersError,
    nats.js.errors.NoStreamResponseError,
    nats.js.errors.ServiceUnavailableError,
    nats.js.errors.ServerError,
)
"""The server is away, starting or slow. A call that ended so may yet have had its effect."""


class BusClosedError(BusError):
    """The bus was closed while it was waited for."""


@dataclass(frozen=True)
class Link:
    """One live connection; a reconnect or a new client makes another."""

    client: Client
    js: JetStreamContext
    generation: int


class Backoff:
    """Growing pauses with jitter, so that many clients of a restarted server spread."""

    def __init__(self, *, first_s: float = 0.05, longest_s: float = 2.0) -> None:
        self._next_s = first_s
        self._longest_s = longest_s

    async def pause(self) -> None:
        """Sleep the next pause."""
        await asyncio.sleep(self._next_s * random.uniform(0.5, 1.0))
        self._next_s = min(self._next_s * 2, self._longest_s)


class Connection:
    """Owns the nats-py client and replaces it when it can't be saved."""

    def __init__(self, url: str, *, name: str, credentials: Credentials | None = None) -> None:
        self.url = url
        self.closing = False
        self.denials = Denials(credentials)
        """What the server does not let us do."""
        self.num_slow_consumers = 0
        """Times that nats-py dropped messages of a subscription; any value above 0 is an alarm."""
        self._name = name
        self._credentials = credentials
        self._refusal: str | None = None
        """Why the server refused us when we last tried; None while it takes us."""
        self._client: Client | None = None
        self._generation = 0
        self._scopes: set[asyncio.Timeout] = set()
        self._listeners: set[asyncio.Event] = set()
        self._closed = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def generation(self) -> int:
        """Rises whenever subscriptions or requests of before may have been lost."""
        return self._generation

    async def open(self, timeout_s: float) -> None:
        """Connect; raises `BusError` where no server answers within `timeout_s`, and at once where it
        does not take us."""
        check_url(self.url)
        try:
            async with asyncio.timeout(timeout_s):
                self._client = await self._connect()
        except TimeoutError:
            raise BusError(
                f"no NATS server answers at {self.url} within {timeout_s:g} s:"
                " check the address, or start nats-server there"
            ) from None
        self._closed.clear()  # clients that were given up are closed, too
        self._supervisor = asyncio.create_task(self._supervise(), name="bus-supervisor")

    async def ready(self) -> Link:
        """The live connection, waited for; raises `BusClosedError` once closed."""
        while True:
            if self.closing:
                raise BusClosedError("the bus is closed")
            client = self._client
            if client is not None and client.is_connected:
                return Link(client, client.jetstream(timeout=CALL_TIMEOUT_S), self._generation)
            await self.wait_for_change(0.2)

    @contextlib.asynccontextmanager
    async def attempt(self, timeout_s: float) -> AsyncIterator[Link]:
        """One try of something, ended by TimeoutError after `timeout_s` or when the link is lost."""
        link = await self.ready()
        with cancellation_kept():
            async with asyncio.timeout(timeout_s) as scope:
                self._scopes.add(scope)
                try:
                    yield link
                finally:
                    self._scopes.discard(scope)

    async def call(
        self, what: str, ask: Callable[[JetStreamContext], Awaitable[T]], *, deadline_s: float = 0
    ) -> T:
        """A JetStream API call that may be repeated, until it is answered or the deadline passes.

        A server that is away is waited for, and the deadline counts tries; only where `deadline_s` is
        given does it bound the wait, too."""
        if deadline_s:
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._call(what, ask, deadline_s=deadline_s)
            except TimeoutError as error:
                raise BusError(f"can't {what}: no answer within {deadline_s:g} s") from error
        return await self._call(what, ask, deadline_s=CALL_DEADLINE_S)

    async def _call(
        self, what: str, ask: Callable[[JetStreamContext], Awaitable[T]], *, deadline_s: float
    ) -> T:
        deadline = time.monotonic() + deadline_s
        backoff = Backoff()
        while True:
            try:
                async with self.attempt(CALL_TIMEOUT_S + 1) as link:
                    return await ask(link.js)
            except RETRYABLE as error:
                if is_lack_of_room(error) or time.monotonic() > deadline:
                    raise BusError(f"can't {what}: {describe(error)}") from error
            except nats.js.errors.NotFoundError:
                raise
            except nats.errors.Error as error:
                raise BusError(f"can't {what}: {describe(error)}") from error
            await backoff.pause()

    async def subscribed(self, link: Link, subject: str) -> None:
        """Return once the server has taken a subscription to `subject` that was just made; raises
        `PermissionDeniedError`."""
        # The server answers in order, but nats-py's ping overtakes the subscription, which waits to be
        # flushed: the second one does not.
        for _ in range(2):
            await link.client.rtt(timeout=ROUND_TRIP_TIMEOUT_S)
        self.denials.check(subject)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Return when the connection changed (or was closed), or after `timeout_s`."""
        event = asyncio.Event()
        with self.listening(event), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()

    async def replaced(self, link: Link) -> None:
        """Return when `link.client` is no longer the client in use."""
        while self._client is link.client and not link.client.is_closed and not self.closing:
            await self.wait_for_change(0.5)

    @contextlib.contextmanager
    def listening(self, event: asyncio.Event) -> Iterator[None]:
        """Set `event` at every change of the connection."""
        self._listeners.add(event)
        try:
            yield
        finally:
            self._listeners.discard(event)

    async def close(self) -> None:
        """Disconnect within 5 s; nothing may be sent afterwards."""
        if self.closing:
            return
        client = self._client
        if client is not None and client.is_connected:
            with contextlib.suppress(*RETRYABLE):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await client.flush(timeout=2)
        self.closing = True
        self._changed()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if client is not None:
            await discard(client)

    async def _connect(self) -> Client:
        reminder = asyncio.get_running_loop().call_later(
            REMINDER_S, log.warning, "no NATS server answers at %s: trying again", self.url
        )
        backoff = Backoff()
        try:
            while True:
                try:
                    async with asyncio.timeout(OPEN_TIMEOUT_S):
                        return await open_client(
                            self.url,
                            name=self._name,
                            credentials=self._credentials,
                            denials=self.denials,
                            on_error=self._on_error,
                            on_reconnected=self._on_reconnected,
                            on_closed=self._on_closed,
                        )
                except (*RETRYABLE, nats.errors.Error):
                    await backoff.pause()
        finally:
            reminder.cancel()

    async def _supervise(self) -> None:
        connected_s = time.monotonic()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WATCH_INTERVAL_S):
                    await self._closed.wait()
            client = self._client
            assert client is not None
            if client.is_connected:
                connected_s = time.monotonic()
                await self._check_round_trip(client)
            elif client.is_closed or time.monotonic() - connected_s > RECONNECT_PATIENCE_S:
                log.warning("connection to %s lost for good: making a new one", self.url)
                await self._rebuild(client)

    async def _check_round_trip(self, client: Client) -> None:
        # Not flush(): with a dead reading task it returns without having heard from the server.
        try:
            with cancellation_kept():
                async with asyncio.timeout(ROUND_TRIP_TIMEOUT_S + 1):
                    await client.rtt(timeout=ROUND_TRIP_TIMEOUT_S)
        except (*RETRYABLE, nats.errors.Error):
            if client.is_connected:
                log.warning("server %s is silent: reconnecting", self.url)
                abort(client)
                await client.force_reconnect()

    async def _rebuild(self, client: Client) -> None:
        self._closed.clear()
        await discard(client)
        while True:
            try:
                self._client = await self._connect()
                break
            except BusError as error:
                # It took us before: whoever renews certificates or the server's configuration is
                # waited for, as a server that is away is.
                self._told(str(error))
                await asyncio.sleep(RECONNECT_PATIENCE_S)
        self._closed.clear()
        self._changed()

    def _changed(self) -> None:
        self._generation += 1
        self._refusal = None
        self.denials.forget()
        now = asyncio.get_running_loop().time()
        for scope in list(self._scopes):
            if not scope.expired():
                scope.reschedule(now)
        for event in list(self._listeners):
            event.set()

    async def _on_reconnected(self) -> None:
        log.info("reconnected to %s", self.url)
        self._changed()

    async def _on_closed(self) -> None:
        self._closed.set()

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.num_slow_consumers += 1
            log.error("messages on %s were dropped: this program reads too slowly", error.subject)
            return
        if is_denial(error):
            denial = self.denials.add(str(error))
            if denial is not None:
                log.error("%s", denial)
            for event in list(self._listeners):
                event.set()
            return
        reason = refusal(error, url=self.url, credentials=self._credentials)
        if reason is not None and self._client is not None:
            self._told(reason)
        else:
            log.debug("connection: %s", describe(error))

    def _told(self, refusal: str) -> None:
        if refusal != self._refusal:
            self._refusal = refusal
            log.error("%s (trying again meanwhile)", refusal)


@contextlib.contextmanager
def cancellation_kept() -> Iterator[None]:
    """Around every wait inside nats-py: a cancellation that arrives in it takes effect at its end.

    nats-py waits by `asyncio.wait_for`, which before Python 3.12 drops a cancellation that arrives
    together with the answer (python/cpython#86296): a service told to stop while it stores would
    never end."""
    task = asyncio.current_task()
    assert task is not None
    num_before = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


NO_ROOM = frozenset({10023, 10028, 10047, 10077})
"""JetStream error codes: insufficient resources, memory or storage exceeded, stream store failed
(which is what a full stream answers)."""


def is_lack_of_room(error: BaseException) -> bool:
    """Whether the server refused because a stream or its store is full."""
    return isinstance(error, nats.js.errors.APIError) and error.err_code in NO_ROOM


def describe(error: BaseException) -> str:
    """One line for people."""
    if isinstance(error, nats.js.errors.ServiceUnavailableError) and not error.code:
        return (
            "JetStream does not answer: is this the cluster's address? A server of your own needs a"
            " jetstream block (deploy/nats/)"
        )
    if isinstance(error, nats.js.errors.APIError) and error.description:
        return error.description
    return str(error) or type(error).__name__
