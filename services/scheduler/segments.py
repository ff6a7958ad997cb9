"""Segment files: the event stream on disk, for replay, once the leader purges it from the server.

``DIR/events/<first>-<last sequence>.segment`` (20 digits each) holds entries of one event each:
4 bytes length, little-endian, then a MessagePack array (stream sequence, timestamp in seconds,
payload). Used by the leader and by `services.scheduler.replay`; knows nothing of what the payloads
mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One message of the event stream."""

    sequence: int
    timestamp_s: float
    payload: bytes


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


def write_segment(folder: Path, entries: Iterable[Entry]) -> None:
    """Store entries as one file that is there whole or not at all; none for no entries."""
    listed = list(entries)
    if not listed:
        return
    folder.mkdir(parents=True, exist_ok=True)
    # Both ends in the name: a deposed leader that thaws must not replace its successor's longer file.
    path = folder / f"{listed[0].sequence:020d}-{listed[-1].sequence:020d}.segment"
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        for entry in listed:
            body = _encoder.encode(entry)
            file.write(len(body).to_bytes(4, "little") + body)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)


def read_segments(folder: Path) -> Iterator[Entry]:
    """All entries in order, each once (a deposed leader and its successor may both have written
    one); raises ValueError for a damaged file."""
    last = 0
    for path in sorted(folder.glob("*.segment")):
        for entry in _entries(path):
            if entry.sequence > last:
                last = entry.sequence
                yield entry


def last_written(folder: Path) -> int:
    """Stream sequence of the last entry on disk; 0 where there is none."""
    lasts = (int(path.stem.partition("-")[2]) for path in folder.glob("*.segment"))
    return max(lasts, default=0)


def _entries(path: Path) -> Iterator[Entry]:
    data = path.read_bytes()
    at = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "little")
        try:
            yield _decoder.decode(data[at + 4 : at + 4 + size])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is damaged at byte {at}: {error}") from error
        at += 4 + size
