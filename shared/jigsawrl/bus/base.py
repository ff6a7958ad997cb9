"""What services may do on the bus, as a protocol: `jigsawrl.bus.client.NatsBus` is the one
implementation, over a real nats-server. There is no in-memory broker: unit tests call handlers.

Every call that waits has an outer deadline; a publish is retried only under the same message id, so
that what was stored by a publish that timed out is not stored twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any, NamedTuple, Protocol

import msgspec

from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Message, Ref, Worker
from jigsawrl.contract.records import Record, WeightManifest
from jigsawrl.contract.requests import Activity
from jigsawrl.contract.streams import StreamSpec, Subjects


class BusError(Exception):
    """The bus could not do it; the text is one line that says what and what to do."""


class PermissionDeniedError(BusError):
    """The server does not let this process's role do it; nothing was sent on."""


class MessageTooLargeError(BusError):
    """The message with its headers exceeds the server's max_payload; nothing was sent."""


class StreamFullError(BusError):
    """The stream refused the message because it is full; nothing was stored."""


class RecordGoneError(BusError):
    """The record that a reference names is no longer stored."""


class NoAnswerError(BusError):
    """Nobody answered a request in its time. Whether it had an effect is not known."""

    def __init__(self, text: str, *, is_served: bool) -> None:
        super().__init__(text)
        self.is_served = is_served
        """Somebody took it at the last whole try, and was silent; otherwise nobody was there."""


class StoredEvent(msgspec.Struct, frozen=True):
    """One message of the event stream; `event` is None where it went to the dead letters."""

    sequence: int
    timestamp_s: float
    """When the server stored it, seconds since the epoch."""
    event: Event | None
    payload: bytes


CommandHandler = Callable[[Any], Awaitable[None]]
"""Called with one command; it is acked after this returns. May be called again with the same one."""

RequestHandler = Callable[[Any], Awaitable[Message]]


class Fill(NamedTuple):
    """What a stream holds, and may hold."""

    stream: str
    num_messages: int
    num_bytes: int
    max_bytes: int
    """0 for a stream that does not exist."""
    last_sequence: int = 0
    """Of the last message stored, also where it has been purged since."""


class BusHealth(NamedTuple):
    """What one connection met since it was made."""

    num_reconnects: int
    num_dropped: int
    """Times that messages were dropped because this process reads too slowly: a fault."""
    num_dead_letters: int
    """That it wrote."""


class Bus(Protocol):
    """One connection of one process."""

    subjects: Subjects

    @property
    def num_dead_letters(self) -> int:
        """Dead letters that this connection wrote."""

    @property
    def health(self) -> BusHealth:
        """For metrics."""

    async def publish_event(self, event: Event) -> int:
        """Store an event; its stream sequence. Waits (and retries) while the stream is full or the
        server is away; raises `MessageTooLargeError`."""

    async def publish_command(self, command: Command) -> int:
        """Store a command for its worker's boot; as `publish_event`."""

    async def store(self, record: Record) -> Ref:
        """Store a record on its stream; as `publish_event`."""

    async def load(self, ref: Ref) -> Any:
        """The record at `ref`; raises `RecordGoneError`."""

    async def request(self, target: str, message: Message, *, timeout_s: float) -> Any:
        """One core-NATS request (repeated until answered within `timeout_s`); a `RequestRefused`
        reply raises `BusError`, no answer `NoAnswerError`."""

    async def serve(
        self, target: str, handler: RequestHandler, *, concurrency: int = 4, shared: bool = True
    ) -> None:
        """Answer requests to `target` until cancelled. A handler's `ValueError` becomes
        `RequestRefused`. Requests are shared out among all that serve a target; without `shared` all
        answer, and the first answer counts: so one that hangs hides no other."""

    async def bind_commands(self, worker: Worker) -> None:
        """Make the durable consumer of this boot's commands (before `WorkerStarted`)."""

    async def consume_commands(
        self, worker: Worker, handler: CommandHandler, *, concurrency: int = 1
    ) -> None:
        """Handle this boot's commands until cancelled: in order with `concurrency` 1; ack after the
        handler returned, in-progress acks while it works; after 5 failures a dead letter."""

    def read_events(self, after: int) -> AsyncIterator[StoredEvent]:
        """All events with a stream sequence above `after`, in order, without gaps, then live ones;
        survives restarts of the server. Stops when closed."""

    def publish_activity(self, activity: Activity) -> None:
        """Telemetry: fire and forget, never waits, never raises."""

    def watch_activities(self, pipeline: str | None) -> AsyncIterator[Activity]:
        """Live telemetry of one pipeline or (None) all."""

    async def create_streams(self, specs: Iterable[StreamSpec]) -> None:
        """Create or update streams; raises `BusError` where the store has no room for them."""

    async def delete_streams(self, names: Iterable[str]) -> None:
        """Delete streams; those that do not exist are no error."""

    async def purge(
        self, stream: str, *, before: int | None = None, subject: str | None = None
    ) -> None:
        """Remove messages with a sequence below `before`, or all on `subject` (may hold wildcards)."""

    async def fill(self, stream: str) -> Fill:
        """How full a stream is; one that does not exist is empty."""

    async def publish_weights(
        self, manifest: WeightManifest, payload: memoryview, *, window: int = 8
    ) -> Ref:
        """Store a version's chunks (windowed, ids by content position, so that a repeat is harmless),
        then its manifest; the manifest's reference."""

    async def fetch_weights(
        self, manifest: Ref, *, window: int = 8
    ) -> tuple[WeightManifest, bytearray]:
        """A version's manifest and payload, checked against its sha256; raises `RecordGoneError`
        or, where the checksum differs after three tries, `BusError`."""

    async def retain_weights(self, pipeline: str, kept: Iterable[tuple[int, int]]) -> None:
        """Remove from the weight channel every (incarnation, version) that is not named."""

    async def save_snapshot(self, payload: bytes) -> None:
        """Store a scheduler snapshot; the last two are kept."""

    async def load_snapshots(self) -> list[bytes]:
        """Stored snapshots, newest first."""

    async def acquire_lease(self, key: str, holder: str) -> int | None:
        """Take a free lease: its revision, or None where another holds it. It ends by itself
        `LEASE_TTL_S` after the last renewal."""

    async def renew_lease(self, key: str, holder: str, revision: int) -> int | None:
        """The new revision; None where the lease was lost."""

    async def release_lease(self, key: str, revision: int) -> None:
        """Give a lease up so that another takes it at once."""

    async def close(self) -> None:
        """Finish what is being sent and disconnect, within 5 s."""
