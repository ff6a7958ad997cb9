"""Reads what trackers wrote, as their viewers do."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event
from wandb.proto.wandb_internal_pb2 import Record

BLOCK_BYTES = 32 * 1024
"""Of the log of a Weights & Biases run, which begins with 7 bytes of its own."""


def events(folder: Path) -> Iterator[Event]:
    """All records of all event files, checked as TensorBoard does it."""

    def masked(data: bytes) -> int:
        crc = crc32c(data)
        return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF

    for path in sorted((folder / "tensorboard").glob("*.tfevents.*")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (size,) = struct.unpack("<Q", data[at : at + 8])
            assert struct.unpack("<I", data[at + 8 : at + 12])[0] == masked(data[at : at + 8])
            body = data[at + 12 : at + 12 + size]
            assert struct.unpack("<I", data[at + 12 + size : at + 16 + size])[0] == masked(body)
            yield Event.FromString(body)
            at += 16 + size


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """(version, tag, value) in the order written."""
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(folder)
        for value in event.summary.value
    ]


def wandb_records(folder: Path) -> Iterator[Record]:
    """Of the only run there: blocks of records, which may be cut at the end of a block."""
    (path,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(whole)
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for record in wandb_records(folder):
        if record.HasField("history"):
            items = record.history.item
            named = {"/".join([x.key] if x.key else x.nested_key): x.value_json for x in items}
            rows.append({k: json.loads(v) for k, v in named.items() if not k.startswith("_")})
    return rows
