"""The base of everything on the wire: messages, references, arrays.

Every message is a frozen, tagged struct, encoded as a MessagePack map by `jigsawrl.contract.codec`
and readable with any MessagePack library. The tag (key ``type``) is the class name in snake case
and also the last token of the message's subject.

This package knows nothing of NATS, torch or numpy: it imports msgspec and the standard library.
"""

from __future__ import annotations

import math
import re
import sys
from array import array
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

SCHEMA_VERSION = 1
"""Raised when a reader of the old schema would misunderstand the new one; new fields need no raise.
Such a change takes two versions: the first adds the new beside the old, the second takes the old away.
So neighbours understand one another, and no others need to."""

MAX_SCHEMAS_APART = 1
"""Services that work together are no further apart than this."""

DType = Literal["int32", "int64", "float32", "float16", "bfloat16", "uint8"]

ITEM_SIZE_BYTES: dict[str, int] = {
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
}

_TYPECODES = {"int32": "i", "int64": "q", "float32": "f", "uint8": "B"}


MAX_ID_CHARACTERS = 512
"""Of a message's id and cause: the id of an event comes back as the cause of every command that it
led to, and those must fit into messages."""

Id = Annotated[str, Meta(max_length=MAX_ID_CHARACTERS)]

Count = Annotated[int, Meta(ge=0, le=2**53)]
"""A number of things, a version, an epoch, a stream sequence: what every language can hold exactly,
and what sums of can't overflow the 64 bits of a snapshot."""

CodeVersion = Annotated[str, Meta(max_length=80)]
"""Of the JigsawRL that a process runs; empty where it was too old to say."""

TOKEN = r"[A-Za-z0-9_-]{1,80}"
"""One token of a subject, without what has a meaning there."""


def snake_case(name: str) -> str:
    """``SequencesFinished`` -> ``sequences_finished``."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=snake_case):
    """Base of every event, command, record, request and telemetry message."""

    schema: int = SCHEMA_VERSION
    id: Id
    """Identity: (tag, object id, owner epoch or incarnation, turn or part), joined by ``:``.
    A repeat of the same message has the same id; a new owner's message has another."""
    cause: Id = ""
    """Id of the message that led to this one; empty at the root of a chain."""

    @classmethod
    def tag(cls) -> str:
        """The wire tag and last subject token of this class."""
        tag = cls.__struct_config__.tag
        assert isinstance(tag, str)
        return tag


def message_id(tag: str, *parts: object) -> str:
    """Join an identity: ``message_id("finished", "p/g3/s1", 2)`` -> ``"finished:p/g3/s1:2"``."""
    return ":".join((tag, *(str(part) for part in parts)))


class Ref(msgspec.Struct, frozen=True):
    """Where a stored record lies: a message of a JetStream stream."""

    stream: str
    sequence: Count
    """Stream sequence, 1 or more."""

    def __post_init__(self) -> None:
        if self.sequence < 1:
            raise ValueError(f"a stream sequence is 1 or more, not {self.sequence}")


Ranges = tuple[tuple[Count, Count], ...]
"""A set of numbers as sorted, disjoint, half-open ranges."""


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """Where a pipeline stands in its data at a version: kept in its checkpoint, opaque to trainers."""

    cursor: Count = 0
    """First training prompt that no group up to this version used."""
    num_admitted: Count = 0
    groups: dict[str, Ranges] = {}
    """Fate (trained, filtered, stale, discarded, failed) -> numbers of the groups that met it; who is
    in none was in flight."""
    sequences: dict[str, Ranges] = {}
    """The same for sequences: number of the group x group size + index."""


class Array(msgspec.Struct, frozen=True):
    """An array as raw little-endian bytes with stated dtype and shape."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape):
            raise ValueError(f"array shape {self.shape} has a negative size")
        expected = math.prod(self.shape) * ITEM_SIZE_BYTES[self.dtype]
        if len(self.data) != expected:
            raise ValueError(
                f"array of dtype {self.dtype} and shape {self.shape} needs {expected} bytes,"
                f" not {len(self.data)}"
            )

    @classmethod
    def of(cls, dtype: Literal["int32", "int64", "float32", "uint8"], values: Any) -> Array:
        """A one-dimensional array from Python numbers."""
        packed = array(_TYPECODES[dtype], values)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(dtype=dtype, shape=(len(packed),), data=packed.tobytes())

    def tolist(self) -> list[Any]:
        """The values as flat Python numbers (row-major); not for 16-bit floats."""
        unpacked = array(_TYPECODES[self.dtype])
        unpacked.frombytes(self.data)
        if sys.byteorder == "big":
            unpacked.byteswap()
        return unpacked.tolist()


class Worker(msgspec.Struct, frozen=True, order=True):
    """One life of a tenant process: a restart has the same id and another boot."""

    id: Annotated[str, Meta(pattern=rf"^{TOKEN}(\.{TOKEN})?$")]
    """``<pipeline>.<role><index>``, for example ``sort-digits.rollout0``; a node's id for nodes."""
    boot: Annotated[str, Meta(pattern=f"^{TOKEN}$")]
    """Unique per process start."""

    def __post_init__(self) -> None:
        # Python's `$` lets a newline pass behind it, JSON Schema's does not: a command to who is called
        # so could never be stored, and would end every leader that tries.
        if self.id.endswith("\n") or self.boot.endswith("\n"):
            raise ValueError(f"worker {self.id!r} of boot {self.boot!r} has a newline in its name")


Role = Literal["environment", "rollout", "reward", "trainer", "evaluation"]

FinishReason = Literal["stop", "length", "aborted"]

SubStageKind = Literal[
    "prefill",
    "bulk_decode",
    "tail_decode",
    "tool_wait",
    "reward_wait",
    "reference_logprobs",
    "proximal_logprobs",
    "forward_backward",
    "optimizer",
    "weight_sync",
    "evaluation",
    "checkpoint",
]
