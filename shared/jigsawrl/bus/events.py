"""The scheduler's event stream as an iterator, undecodable messages put aside.

Used by `client`. It decides nothing about events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from jigsawrl.bus.base import StoredEvent
from jigsawrl.bus.connection import Connection
from jigsawrl.bus.dead_letters import DeadLetters
from jigsawrl.bus.reading import read_stream
from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.contract.events import Event

BATCH = 500
"""Messages per pull request: at most 8 MB each, in practice under 2 KB."""


async def read_events(
    connection: Connection, dead_letters: DeadLetters, *, stream: str, after: int
) -> AsyncIterator[StoredEvent]:
    """See `Bus.read_events`."""
    reading = read_stream(connection, stream, after=after, batch=BATCH, to_end=False)
    async for delivery, message in reading:
        event: Event | None = None
        try:
            event = EVENTS.decode(message.data)
        except UndecodableError as error:
            await dead_letters.write(
                subject=message.subject,
                payload=message.data,
                reason=str(error),
                stream=stream,
                sequence=delivery.stream_sequence,
            )
        yield StoredEvent(
            sequence=delivery.stream_sequence,
            timestamp_s=delivery.timestamp_s,
            event=event,
            payload=message.data,
        )
