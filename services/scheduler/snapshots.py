"""Scheduler snapshots as they are stored: on the bus for the next leader, on disk for replay.

Used by the leader and by `services.scheduler.replay`. ``DIR/snapshots/<sequence>.snapshot`` (20
digits) is the state after that message of the event stream; files are written whole or not at all. The
newest stay, and of older ones one per hour.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import msgspec
import structlog

from jigsawrl import __version__
from jigsawrl.bus.base import BusError
from jigsawrl.contract.message import Count

log = structlog.get_logger()

NUM_KEPT = 20
"""Newest snapshots that stay on disk whatever their age: some 20 minutes at one a minute."""

KEPT_PERIOD_S = 3600.0
"""Of the older ones, one for each such period stays: a replay then folds an hour at most before it
comes to what it is to show."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after one message, and who wrote it."""

    sequence: Count
    """Stream sequence of the last message folded."""
    code_version: str
    state: bytes
    """`core.Scheduler.snapshot`; compressed where the snapshot is stored."""
    handed_over: bool = False
    """Its writer stopped with it: it handled no later message, so another version may go on."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Snapshot)


def encode_snapshot(snapshot: Snapshot) -> bytes:
    """As it is stored: the state compressed by zlib at its fastest, to a sixth or less, since it must
    fit into one message."""
    state = zlib.compress(snapshot.state, 1)
    return _encoder.encode(msgspec.structs.replace(snapshot, state=state))


def _decode(payload: bytes) -> Snapshot:
    """Raises ValueError."""
    try:
        snapshot = _decoder.decode(payload)
        return msgspec.structs.replace(snapshot, state=zlib.decompress(snapshot.state))
    except (msgspec.DecodeError, zlib.error) as error:
        raise ValueError(str(error)) from error


def stored_sequences(payloads: Iterable[bytes]) -> list[int]:
    """Of those that can be read, in order."""
    sequences = []
    for payload in payloads:
        with contextlib.suppress(ValueError):
            sequences.append(_decode(payload).sequence)
    return sorted(sequences)


def newest(payloads: Iterable[bytes], *, code_version: str = __version__) -> Snapshot | None:
    """The snapshot to lead on from; None where there is none. The newest by stream sequence: a leader
    that was frozen may store an old one after its successor's. Raises `BusError` where this version
    of the code can't take over: it might answer messages otherwise than their commands that are out.
    """
    read, num_unreadable = [], 0
    for payload in payloads:
        try:
            read.append(_decode(payload))
        except ValueError as error:
            num_unreadable += 1
            log.warning("a snapshot can't be read", error=str(error))
    if not read:
        if num_unreadable:
            raise BusError(
                "no snapshot can be read by this version: start the version that wrote it"
            )
        return None
    found = max(read, key=lambda snapshot: snapshot.sequence)
    if not found.handed_over:
        check_version(found.code_version, code_version)
    elif num_unreadable and found.code_version != code_version:
        raise BusError(
            f"version {found.code_version} of the scheduler handed over, but a stored snapshot can't be"
            f" read by this version, {code_version}: start the version that wrote it"
        )
    return found


def check_version(led: str, code_version: str = __version__) -> None:
    """Raise `BusError` where another version of the code led and did not hand over."""
    if led != code_version:
        raise BusError(
            f"version {led} of the scheduler led last and did not stop in order; this"
            f" is {code_version}: start {led} once more and stop it with SIGTERM"
        )


def write_snapshot(folder: Path, *, sequence: int, payload: bytes) -> None:
    """Keep an encoded one for replay, at the price of older ones."""
    folder.mkdir(parents=True, exist_ok=True)
    path = _path(folder, sequence)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    thin_snapshots(folder)


def thin_snapshots(folder: Path) -> None:
    """Remove older snapshots but for the first of each `KEPT_PERIOD_S`, by the time of writing."""
    periods = set()
    for sequence in sequences_on_disk(folder)[:-NUM_KEPT]:
        path = _path(folder, sequence)
        period = path.stat().st_mtime // KEPT_PERIOD_S
        if period in periods:
            path.unlink()
        periods.add(period)


def sequences_on_disk(folder: Path) -> list[int]:
    """Of the snapshots in a folder, in order."""
    return sorted(int(path.stem) for path in folder.glob("*.snapshot"))


def read_snapshot(folder: Path, sequence: int) -> Snapshot:
    """One of them; raises ValueError where it is not there or damaged."""
    path = _path(folder, sequence)
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        known = ", ".join(map(str, sequences_on_disk(folder))) or "none"
        raise ValueError(
            f"{folder} has no snapshot of message {sequence}; it has {known}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _path(folder: Path, sequence: int) -> Path:
    return folder / f"{sequence:020d}.snapshot"
