"""`NatsBus`: the bus of `jigsawrl.bus.base` over a real nats-server.

Services call `connect` once and use the protocol; everything below is delegated to one file each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from jigsawrl.bus import commands, events, requests, streams
from jigsawrl.bus.base import (
    BusError,
    BusHealth,
    CommandHandler,
    Fill,
    MessageTooLargeError,
    RequestHandler,
    StoredEvent,
)
from jigsawrl.bus.connection import Connection
from jigsawrl.bus.credentials import Credentials
from jigsawrl.bus.dead_letters import DeadLetters
from jigsawrl.bus.lease import Leases
from jigsawrl.bus.publishing import Publisher
from jigsawrl.bus.weights import WeightChannel
from jigsawrl.contract.codec import RECORDS, UndecodableError, encode
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Message, Ref, Worker
from jigsawrl.contract.records import Record, WeightManifest
from jigsawrl.contract.requests import Activity
from jigsawrl.contract.streams import StreamSpec, Subjects
from jigsawrl.tracing import Traces

FINISH_TIMEOUT_S = 0.8
"""A close waits so long for what is being stored; with the connection's part it stays under 5 s."""


async def connect(
    url: str,
    *,
    name: str,
    prefix: str = "jig",
    timeout_s: float = 10,
    credentials: Credentials | None = None,
) -> NatsBus:
    """A bus connected to the server at `url` (of a cluster, those of several servers with commas
    between); raises `BusError` after `timeout_s`, and at once where the server refuses us.

    `name` is shown by the server's monitoring; `prefix` is the first token of all subjects. Without
    `credentials` there is no TLS, and only a server that asks for none lets us in."""
    connection = Connection(url, name=name, credentials=credentials)
    await connection.open(timeout_s)
    return NatsBus(connection, Subjects(prefix))


class NatsBus:
    """One connection of one process; see `jigsawrl.bus.base.Bus` for what each method promises."""

    def __init__(self, connection: Connection, subjects: Subjects) -> None:
        self.subjects = subjects
        self.connection = connection
        """For the tests of this package."""
        self._traces = Traces()
        self._publisher = Publisher(connection, self._traces)
        self._dead_letters = DeadLetters(self._publisher, subjects)
        self._weights = WeightChannel(connection, self._publisher, subjects)
        self._leases = Leases(connection, bucket=subjects.lease_bucket())
        self._telemetry = requests.TelemetrySender(connection, self._traces)
        self._sender = asyncio.create_task(self._telemetry.run(), name="bus-telemetry")

    @property
    def num_dead_letters(self) -> int:
        return self._dead_letters.num_written

    @property
    def health(self) -> BusHealth:
        return BusHealth(
            num_reconnects=self.connection.generation,
            num_dropped=self.connection.num_slow_consumers,
            num_dead_letters=self._dead_letters.num_written,
        )

    # --- Messages ---------------------------------------------------------------------------------

    async def publish_event(self, event: Event) -> int:
        return await self._store(self.subjects.event(event), event)

    async def publish_command(self, command: Command) -> int:
        return await self._store(self.subjects.command(command), command)

    async def store(self, record: Record) -> Ref:
        sequence = await self._store(self.subjects.record(record), record)
        return Ref(self._stream_of(record), sequence)

    async def _store(self, subject: str, message: Message) -> int:
        payload = encode(message)
        try:
            return await self._publisher.store(subject, payload, message.id, cause=message.cause)
        except MessageTooLargeError as error:
            await self._dead_letters.write(subject=subject, payload=payload, reason=str(error))
            raise

    async def load(self, ref: Ref) -> Any:
        message = await streams.load(self.connection, ref)
        payload = message.data or b""
        try:
            return RECORDS.decode(payload)
        except UndecodableError as error:
            await self._dead_letters.write(
                subject=message.subject or "",
                payload=payload,
                reason=str(error),
                stream=ref.stream,
                sequence=ref.sequence,
            )
            raise BusError(f"message {ref.sequence} of {ref.stream}: {error}") from error

    async def request(self, target: str, message: Message, *, timeout_s: float) -> Any:
        subject = self.subjects.request(target)
        return await requests.request(
            self.connection, self._traces, subject, message, timeout_s=timeout_s
        )

    async def serve(
        self, target: str, handler: RequestHandler, *, concurrency: int = 4, shared: bool = True
    ) -> None:
        await requests.RequestServer(
            self.connection,
            self._dead_letters,
            self._traces,
            handler,
            subject=self.subjects.request(target),
            concurrency=concurrency,
            shared=shared,
        ).run()

    async def bind_commands(self, worker: Worker) -> None:
        await commands.bind(
            self.connection,
            stream=self.subjects.commands_stream().name,
            worker=worker,
            subject=self.subjects.commands_of(worker),
        )

    async def consume_commands(
        self, worker: Worker, handler: CommandHandler, *, concurrency: int = 1
    ) -> None:
        await commands.CommandLoop(
            self.connection,
            self._dead_letters,
            self._traces,
            handler,
            stream=self.subjects.commands_stream().name,
            worker=worker,
            concurrency=concurrency,
        ).run()

    def read_events(self, after: int) -> AsyncIterator[StoredEvent]:
        stream = self.subjects.events_stream().name
        return events.read_events(self.connection, self._dead_letters, stream=stream, after=after)

    def publish_activity(self, activity: Activity) -> None:
        self._telemetry.put(self.subjects.telemetry(activity), activity)

    def watch_activities(self, pipeline: str | None) -> AsyncIterator[Activity]:
        subject = f"{self.subjects.prefix}.telemetry.{pipeline or '*'}.{Activity.tag()}"
        return requests.watch_activities(self.connection, self._dead_letters, subject=subject)

    # --- Streams ----------------------------------------------------------------------------------

    async def create_streams(self, specs: Iterable[StreamSpec]) -> None:
        await streams.create_streams(self.connection, specs)

    async def delete_streams(self, names: Iterable[str]) -> None:
        await streams.delete_streams(self.connection, names)

    async def purge(
        self, stream: str, *, before: int | None = None, subject: str | None = None
    ) -> None:
        await streams.purge(self.connection, stream, before=before, subject=subject)

    async def fill(self, stream: str) -> Fill:
        return await streams.fill(self.connection, stream)

    # --- Weights, snapshots, leases ---------------------------------------------------------------

    async def publish_weights(
        self, manifest: WeightManifest, payload: memoryview, *, window: int = 8
    ) -> Ref:
        return await self._weights.publish(manifest, payload, window=window)

    async def fetch_weights(
        self, manifest: Ref, *, window: int = 8
    ) -> tuple[WeightManifest, bytearray]:
        return await self._weights.fetch(manifest, window=window)

    async def retain_weights(self, pipeline: str, kept: Iterable[tuple[int, int]]) -> None:
        await self._weights.retain(pipeline, kept)

    async def save_snapshot(self, payload: bytes) -> None:
        subject = self.subjects.snapshots_stream().subjects[0]
        await streams.save_snapshot(self._publisher, subject=subject, payload=payload)

    async def load_snapshots(self) -> list[bytes]:
        return await streams.load_snapshots(self.connection, self.subjects.snapshots_stream().name)

    async def acquire_lease(self, key: str, holder: str) -> int | None:
        return await self._leases.acquire(key, holder)

    async def renew_lease(self, key: str, holder: str, revision: int) -> int | None:
        return await self._leases.renew(key, holder, revision)

    async def release_lease(self, key: str, revision: int) -> None:
        await self._leases.release(key, revision)

    async def close(self) -> None:
        await self._publisher.finish(FINISH_TIMEOUT_S)
        self._sender.cancel()
        await asyncio.gather(self._sender, return_exceptions=True)
        await self.connection.close()

    def _stream_of(self, record: Record) -> str:
        if record.tag().startswith("weight_"):
            return self.subjects.weights_stream(record.pipeline).name
        if record.tag() == "dead_letter":
            return self.subjects.dead_letters_stream().name
        return self.subjects.data_stream(record.pipeline).name
