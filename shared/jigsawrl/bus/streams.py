"""Makes, deletes, purges and counts streams; reads single records; keeps snapshots.

Used by `client`. What streams exist is the contract's; nothing is decided here.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RawStreamMsg, RetentionPolicy, StorageType, StreamConfig

from jigsawrl.bus.base import BusError, Fill, RecordGoneError
from jigsawrl.bus.connection import Connection, is_lack_of_room
from jigsawrl.bus.publishing import Publisher
from jigsawrl.bus.replicas import replicated
from jigsawrl.contract.message import Ref
from jigsawrl.contract.streams import StreamSpec

NAME_IN_USE = 10058
"""JetStream error code: the stream exists with another configuration."""


def stream_config(spec: StreamSpec, *, num_replicas: int) -> StreamConfig:
    """The server's view of a row of the stream table. Discard NEW is said explicitly: the library's
    default, OLD, silently loses what is stored."""
    return StreamConfig(
        name=spec.name,
        subjects=list(spec.subjects),
        retention=RetentionPolicy(spec.retention),
        storage=StorageType(spec.storage),
        discard=DiscardPolicy.NEW,
        max_bytes=spec.max_bytes,
        max_msgs_per_subject=spec.max_msgs_per_subject or -1,
        duplicate_window=spec.duplicate_window_s,
        allow_direct=True,
        num_replicas=num_replicas,
    )


async def create_streams(connection: Connection, specs: Iterable[StreamSpec]) -> None:
    """See `Bus.create_streams`."""
    for spec in specs:

        async def create(js: JetStreamContext, num_replicas: int, spec: StreamSpec = spec) -> None:
            config = stream_config(spec, num_replicas=num_replicas)
            try:
                await js.add_stream(config)
            except nats.js.errors.BadRequestError as error:
                if error.err_code != NAME_IN_USE:
                    raise
                await js.update_stream(config)

        try:
            await connection.call(f"make the stream {spec.name}", lambda js: replicated(js, create))
        except BusError as error:
            if error.__cause__ is not None and is_lack_of_room(error.__cause__):
                raise await _no_room(connection, spec) from error
            raise


async def _no_room(connection: Connection, spec: StreamSpec) -> BusError:
    account = await connection.call("ask for the size of the store", lambda js: js.account_info())
    limit = account.limits.max_storage if account.limits.max_storage > 0 else None
    room = f"; the account may store {limit} bytes" if limit else ""
    return BusError(
        f"the store has no room for the stream {spec.name}: it needs {spec.max_bytes} bytes"
        f" ({account.storage} are in use{room}): free disk space or make the stream smaller"
    )


async def delete_streams(connection: Connection, names: Iterable[str]) -> None:
    """See `Bus.delete_streams`."""
    for name in names:
        with contextlib.suppress(nats.js.errors.NotFoundError):
            await _delete_stream(connection, name)


async def _delete_stream(connection: Connection, name: str) -> None:
    await connection.call(f"delete the stream {name}", lambda js: js.delete_stream(name))


async def purge(
    connection: Connection, stream: str, *, before: int | None, subject: str | None
) -> None:
    """See `Bus.purge`; a stream that does not exist is purged already."""
    if (before is None) == (subject is None):
        raise ValueError("purge needs either `before` or `subject`")
    try:
        await connection.call(
            f"purge {stream}", lambda js: js.purge_stream(stream, seq=before, subject=subject)
        )
    except nats.js.errors.NotFoundError:
        return


async def fill(connection: Connection, stream: str) -> Fill:
    """See `Bus.fill`."""
    try:
        info = await connection.call(f"look at {stream}", lambda js: js.stream_info(stream))
    except nats.js.errors.NotFoundError:
        return Fill(stream, 0, 0, 0)
    state, max_bytes = info.state, info.config.max_bytes or 0
    return Fill(stream, state.messages, state.bytes, max_bytes, state.last_seq)


async def subjects_stored(connection: Connection, stream: str, subject: str) -> dict[str, int]:
    """Stored messages per subject, of those that match; empty where the stream does not exist."""
    try:
        info = await connection.call(
            f"list {stream}", lambda js: js.stream_info(stream, subjects_filter=subject)
        )
    except nats.js.errors.NotFoundError:
        return {}
    return info.state.subjects or {}


async def load(connection: Connection, ref: Ref) -> RawStreamMsg:
    """The stored message that `ref` names; raises `RecordGoneError`."""

    async def get(js: JetStreamContext) -> RawStreamMsg:
        try:
            return await js.get_msg(ref.stream, ref.sequence, direct=True)
        except nats.js.errors.NotFoundError:
            # Any server of a cluster answers, also one that has not got the message yet: only the
            # stream's leader knows that there is none.
            return await js.get_msg(ref.stream, ref.sequence, direct=False)
        except nats.errors.NoRespondersError:
            # No stream, or a server that is still starting: this question knows which.
            await js.stream_info(ref.stream)
            raise

    try:
        return await connection.call(f"load {ref.stream} {ref.sequence}", get)
    except nats.js.errors.NotFoundError:
        raise RecordGoneError(
            f"message {ref.sequence} of {ref.stream} is no longer stored"
        ) from None


async def save_snapshot(publisher: Publisher, *, subject: str, payload: bytes) -> None:
    """See `Bus.save_snapshot`; raises `StreamFullError`, since the leader goes on without it."""
    digest = hashlib.sha256(payload).hexdigest()
    await publisher.store(subject, payload, f"snapshot:{digest}", wait_when_full=False)


async def load_snapshots(connection: Connection, stream: str) -> list[bytes]:
    """See `Bus.load_snapshots`."""
    try:
        info = await connection.call("look for snapshots", lambda js: js.stream_info(stream))
    except nats.js.errors.NotFoundError:
        return []
    payloads = []
    for sequence in range(info.state.last_seq, max(info.state.first_seq, 1) - 1, -1):
        try:
            message = await load(connection, Ref(stream, sequence))
        except RecordGoneError:
            continue
        payloads.append(message.data or b"")
    return payloads
