"""Messages to MessagePack bytes and back. Unknown fields are ignored; unknown tags and undecodable
payloads raise `UndecodableError`, which the bus turns into dead letters."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from jigsawrl.contract.commands import CommandType
from jigsawrl.contract.events import EventType
from jigsawrl.contract.message import SCHEMA_VERSION, Message
from jigsawrl.contract.records import RecordType
from jigsawrl.contract.requests import ReplyType, RequestType, TelemetryType

M = TypeVar("M", bound=Message)

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
        if message.schema > SCHEMA_VERSION:
            raise UndecodableError(
                f"message {message.id} has schema {message.schema};"
                f" this program reads up to {SCHEMA_VERSION}"
            )
        return message


EVENTS: Decoder[Any] = Decoder(EventType)
COMMANDS: Decoder[Any] = Decoder(CommandType)
RECORDS: Decoder[Any] = Decoder(RecordType)
REQUESTS: Decoder[Any] = Decoder(RequestType)
REPLIES: Decoder[Any] = Decoder(ReplyType)
TELEMETRY: Decoder[Any] = Decoder(TelemetryType)
