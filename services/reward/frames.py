"""What the reward service and its scorer processes say to each other over a pair of pipes: a length of
four bytes, little-endian, then one MessagePack map."""

from __future__ import annotations

import struct
from typing import BinaryIO

import msgspec

from jigsawrl.config import TaskConfig

HEADER = struct.Struct("<I")


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The first frame to a scorer; it answers `Ready`."""

    task: TaskConfig
    seed: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The scorer has built its task."""


class Sample(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One response to score; answered by `Result` or `Unscorable`."""

    fields: dict[str, str]
    response: str


class Result(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a response is worth."""

    reward: float
    correct: bool


class Unscorable(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The task's scorer refused the response."""

    reason: str


Frame = Setup | Ready | Sample | Result | Unscorable

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


def pack(frame: Frame) -> bytes:
    """A frame with its header."""
    payload = _encoder.encode(frame)
    return HEADER.pack(len(payload)) + payload


def unpack(payload: bytes) -> Frame:
    """A frame without its header."""
    return _decoder.decode(payload)


def read(pipe: BinaryIO) -> Frame | None:
    """The next frame; None at the end of the pipe."""
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (num_bytes,) = HEADER.unpack(header)
    return unpack(pipe.read(num_bytes))


def write(pipe: BinaryIO, frame: Frame) -> None:
    """Send a frame at once."""
    pipe.write(pack(frame))
    pipe.flush()
