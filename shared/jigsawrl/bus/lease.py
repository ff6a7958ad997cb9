"""The leader lease: one key of a KV bucket whose entries end by themselves.

Used by `client`. The bucket's ``ttl`` ends a lease, not a per-message one: after that, nats-py finds
an entry without a value and can't take the key again. Expiry sends no watch event, so standbys try.
"""

from __future__ import annotations

import contextlib

import nats.js.errors
from nats.js import JetStreamContext
from nats.js.api import KeyValueConfig, StorageType
from nats.js.kv import KeyValue

from jigsawrl.bus.base import BusError
from jigsawrl.bus.connection import CALL_TIMEOUT_S, Connection
from jigsawrl.bus.replicas import replicated

LEASE_TTL_S = 5.0
"""Life of a lease after its last renewal; the holder renews every second."""


class Leases:
    """Leases of one bucket. `holder` names one process start, so that a lease found under it is
    the answer to an own try that timed out."""

    def __init__(self, connection: Connection, *, bucket: str) -> None:
        self._connection = connection
        self._bucket = bucket

    async def acquire(self, key: str, holder: str) -> int | None:
        """See `Bus.acquire_lease`."""

        async def create(js: JetStreamContext) -> int | None:
            store = await self._store(js)
            try:
                return await store.create(key, holder.encode())
            except nats.js.errors.KeyWrongLastSequenceError:
                return await _revision_of(store, key, holder)

        return await self._connection.call(f"take the lease {key}", create)

    async def renew(self, key: str, holder: str, revision: int) -> int | None:
        """See `Bus.renew_lease`. Where the server does not answer within the term, it is lost."""

        async def update(js: JetStreamContext) -> int | None:
            store = await self._store(js)
            try:
                return await store.update(key, holder.encode(), last=revision)
            except nats.js.errors.KeyWrongLastSequenceError:
                return await _revision_of(store, key, holder)

        try:
            return await self._connection.call(
                f"renew the lease {key}", update, deadline_s=LEASE_TTL_S - CALL_TIMEOUT_S
            )
        except BusError:
            return None

    async def release(self, key: str, revision: int) -> None:
        """See `Bus.release_lease`."""

        async def delete(js: JetStreamContext) -> None:
            store = await self._store(js)
            with contextlib.suppress(nats.js.errors.KeyWrongLastSequenceError):
                await store.delete(key, last=revision)

        with contextlib.suppress(BusError):
            await self._connection.call(f"release the lease {key}", delete, deadline_s=2.0)

    async def _store(self, js: JetStreamContext) -> KeyValue:
        try:
            return await js.key_value(self._bucket)
        except nats.js.errors.BucketNotFoundError:
            return await replicated(js, self._create)

    async def _create(self, js: JetStreamContext, num_replicas: int) -> KeyValue:
        return await js.create_key_value(
            KeyValueConfig(
                bucket=self._bucket,
                ttl=LEASE_TTL_S,
                history=1,
                max_bytes=1024 * 1024,
                storage=StorageType.FILE,
                replicas=num_replicas,
            )
        )


async def _revision_of(store: KeyValue, key: str, holder: str) -> int | None:
    """The lease's revision where `holder` has it, else None."""
    try:
        entry = await store.get(key)
    except nats.js.errors.KeyNotFoundError:
        return None
    return entry.revision if entry.value == holder.encode() else None
