"""Messages to MessagePack bytes and back. Unknown fields are ignored; unknown tags, undecodable
payloads and schemas that are too new raise `UndecodableError`, which the bus turns into dead letters.

Older schemas are all read: what was recorded once stays readable. Whether services of two schemas may
work together is for the scheduler to say (`core.introductions`), which hears of both by messages that
are read whatever their schema is."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from jigsawrl.contract.commands import CommandType
from jigsawrl.contract.events import (
    EventType,
    Heartbeat,
    LeaderElected,
    NodeStarted,
    NodeStopped,
    WorkerStarted,
)
from jigsawrl.contract.message import MAX_SCHEMAS_APART, SCHEMA_VERSION, Message
from jigsawrl.contract.records import RecordType
from jigsawrl.contract.requests import ReplyType, RequestType, TelemetryType

M = TypeVar("M", bound=Message)

INTRODUCTIONS = (LeaderElected, NodeStarted, NodeStopped, Heartbeat, WorkerStarted)
"""Read whatever their schema is, so that who is too far apart is refused by name. Their fields keep
their meaning for ever."""

NEWEST_READABLE = SCHEMA_VERSION + MAX_SCHEMAS_APART

_encoder = msgspec.msgpack.Encoder()


class UndecodableError(ValueError):
    """The payload is no message of the expected family; the text says why, in one line."""


def encode(message: Message) -> bytes:
    """One message as a MessagePack map."""
    return _encoder.encode(message)


class Decoder(Generic[M]):
    """Decodes one family of messages (a tagged union)."""

    def __init__(self, family: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(family)

    def decode(self, payload: bytes) -> M:
        """The message; raises `UndecodableError` for anything else."""
        try:
            message = self._decoder.decode(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            raise UndecodableError(str(error)) from error
        if message.schema > NEWEST_READABLE and not isinstance(message, INTRODUCTIONS):
            raise UndecodableError(
                f"message {message.id} has schema {message.schema};"
                f" this program reads up to {NEWEST_READABLE}"
            )
        return message


EVENTS: Decoder[Any] = Decoder(EventType)
COMMANDS: Decoder[Any] = Decoder(CommandType)
RECORDS: Decoder[Any] = Decoder(RecordType)
REQUESTS: Decoder[Any] = Decoder(RequestType)
REPLIES: Decoder[Any] = Decoder(ReplyType)
TELEMETRY: Decoder[Any] = Decoder(TelemetryType)
