"""The weight channel: one version as a manifest and chunks of about 1 MB on a stream.

Used by `client`. Not the object store: nats-py's is ten times slower to read (issue 703). A chunk's
id holds the payload's checksum, so that a repeat is stored once while a re-run version with other
bits is stored again; a reader lets the later chunk win and checks the whole against the manifest.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Iterable, Iterator

import nats.js.errors

from jigsawrl.bus.base import BusError, RecordGoneError, StreamFullError
from jigsawrl.bus.connection import Backoff, Connection
from jigsawrl.bus.publishing import Publisher
from jigsawrl.bus.reading import read_stream
from jigsawrl.bus.streams import load, purge, subjects_stored
from jigsawrl.contract.codec import RECORDS, UndecodableError, encode
from jigsawrl.contract.message import Ref, message_id
from jigsawrl.contract.records import WeightChunk, WeightManifest
from jigsawrl.contract.streams import MAX_WEIGHT_BYTES, Subjects

NUM_TRIES = 3
"""Reads of a version before its checksum counts as wrong, at least."""

LAG_S = 3.0
"""So long chunks may be missing, or be those of an earlier run of the version: a reader is served by
any server of the cluster, also by one that has not got yet what the others have acknowledged."""


class WeightChannel:
    """Publishes, fetches and removes versions."""

    def __init__(self, connection: Connection, publisher: Publisher, subjects: Subjects) -> None:
        self._connection = connection
        self._publisher = publisher
        self._subjects = subjects

    async def publish(self, manifest: WeightManifest, payload: memoryview, *, window: int) -> Ref:
        """See `Bus.publish_weights`."""
        payload = payload.cast("B")
        _check(manifest, payload)
        subject = self._subjects.record(manifest)
        stream = self._subjects.weights_stream(manifest.pipeline).name
        chunks = iter(range(manifest.num_chunks))
        # Not a TaskGroup: after a failure the others' chunks are on the wire, and must have arrived
        # before the caller purges to make room.
        results = await asyncio.gather(
            *(self._publish_chunks(manifest, payload, chunks) for _ in range(window)),
            return_exceptions=True,
        )
        try:
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            sequence = await self._publisher.store_last(
                subject, encode(manifest), manifest.id, cause=manifest.cause
            )
        except StreamFullError:
            raise StreamFullError(
                f"the weight channel {stream} is full: version {manifest.version} needs"
                f" {manifest.num_bytes} bytes; old versions must go first or the stream must be"
                " larger"
            ) from None
        return Ref(stream, sequence)

    async def _publish_chunks(
        self, manifest: WeightManifest, payload: memoryview, chunks: Iterator[int]
    ) -> None:
        for index in chunks:
            start = index * manifest.chunk_bytes
            chunk = WeightChunk(
                id=message_id(
                    WeightChunk.tag(),
                    manifest.pipeline,
                    manifest.incarnation,
                    manifest.version,
                    manifest.sha256[:16],
                    index,
                ),
                cause=manifest.id,
                pipeline=manifest.pipeline,
                incarnation=manifest.incarnation,
                version=manifest.version,
                index=index,
                data=bytes(payload[start : start + manifest.chunk_bytes]),
            )
            await self._publisher.store_last(
                self._subjects.record(chunk), encode(chunk), chunk.id, cause=chunk.cause
            )

    async def fetch(self, ref: Ref, *, window: int) -> tuple[WeightManifest, bytearray]:
        """See `Bus.fetch_weights`."""
        message = await load(self._connection, ref)
        manifest = RECORDS.decode(message.data or b"")
        if not isinstance(manifest, WeightManifest):
            raise BusError(f"message {ref.sequence} of {ref.stream} is no weight manifest")
        loop = asyncio.get_running_loop()
        deadline_s, backoff = loop.time() + LAG_S, Backoff()
        for num_tries in itertools.count(1):
            payload, num_missing = await self._fetch_chunks(ref.stream, manifest, window=window)
            digest = await asyncio.to_thread(lambda data: hashlib.sha256(data).hexdigest(), payload)
            if not num_missing and digest == manifest.sha256:
                return manifest, payload
            if loop.time() > deadline_s and (num_missing or num_tries >= NUM_TRIES):
                break
            await backoff.pause()
        of = f"weights {manifest.incarnation}/{manifest.version} of {manifest.pipeline}"
        if num_missing:
            raise RecordGoneError(
                f"{num_missing} of {manifest.num_chunks} chunks of {of} are not stored"
            )
        raise BusError(
            f"{of} are corrupt: their checksum differs from the manifest's in {num_tries} reads"
        )

    async def _fetch_chunks(
        self, stream: str, manifest: WeightManifest, *, window: int
    ) -> tuple[bytearray, int]:
        """What one server has of the payload, and how many chunks it lacks."""
        payload = bytearray(manifest.num_bytes)
        missing = set(range(manifest.num_chunks))
        version = self._subjects.weights_of_version(
            manifest.pipeline, manifest.incarnation, manifest.version
        )
        try:
            async for _, message in read_stream(
                self._connection,
                stream,
                after=0,
                subject=f"{version}.*.{WeightChunk.tag()}",
                batch=window,
                to_end=True,
            ):
                chunk = _chunk(message.data, manifest)
                if chunk is not None:
                    start = chunk.index * manifest.chunk_bytes
                    payload[start : start + len(chunk.data)] = chunk.data
                    missing.discard(chunk.index)
        except nats.js.errors.NotFoundError:
            pass
        return payload, len(missing)

    async def retain(self, pipeline: str, kept: Iterable[tuple[int, int]]) -> None:
        """See `Bus.retain_weights`."""
        stream = self._subjects.weights_stream(pipeline).name
        prefixes = {
            self._subjects.weights_of_version(pipeline, incarnation, version)
            for incarnation, version in kept
        }
        num_tokens = self._subjects.weights_of_version(pipeline, 0, 0).count(".") + 1
        stored = await subjects_stored(
            self._connection, stream, f"{self._subjects.prefix}.weights.{pipeline}.>"
        )
        for version in {".".join(subject.split(".")[:num_tokens]) for subject in stored} - prefixes:
            await purge(self._connection, stream, before=None, subject=f"{version}.>")


def _check(manifest: WeightManifest, payload: memoryview) -> None:
    if manifest.num_bytes > MAX_WEIGHT_BYTES:
        raise BusError(
            f"weights of {manifest.num_bytes} bytes are too large for the NATS weight channel"
            f" ({MAX_WEIGHT_BYTES} bytes): it takes a shared disk or a process group to move them"
        )
    num_chunks = -(-manifest.num_bytes // manifest.chunk_bytes)
    assert len(payload) == manifest.num_bytes, "the manifest states another size"
    assert num_chunks == manifest.num_chunks, "the manifest states another number of chunks"


def _chunk(payload: bytes, manifest: WeightManifest) -> WeightChunk | None:
    """The chunk, or None for what is none or does not fit: the missing one is noticed later."""
    try:
        chunk = RECORDS.decode(payload)
    except UndecodableError:
        return None
    if not isinstance(chunk, WeightChunk) or not 0 <= chunk.index < manifest.num_chunks:
        return None
    start = chunk.index * manifest.chunk_bytes
    if len(chunk.data) != min(manifest.chunk_bytes, manifest.num_bytes - start):
        return None
    return chunk
