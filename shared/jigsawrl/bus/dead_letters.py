"""Puts aside what could not be decoded or handled: logged, counted, stored with the reason.

Used by the readers of this package. A dead letter never stops them: where it can't be stored it is
dropped after one log line.
"""

from __future__ import annotations

import asyncio
import uuid

from jigsawrl.bus.base import BusError
from jigsawrl.bus.connection import log
from jigsawrl.bus.publishing import Publisher
from jigsawrl.contract.codec import encode
from jigsawrl.contract.message import message_id
from jigsawrl.contract.records import DeadLetter
from jigsawrl.contract.streams import Subjects

PAYLOAD_BYTES = 64 * 1024
"""What is kept of the payload."""

STORE_TIMEOUT_S = 5.0
"""The reader goes on after this, stored or not."""


class DeadLetters:
    """Writes and counts the dead letters of one connection."""

    def __init__(self, publisher: Publisher, subjects: Subjects) -> None:
        self._publisher = publisher
        self._subjects = subjects
        self.num_written = 0
        self._writer = uuid.uuid4().hex[:12]
        """Part of the ids of letters that no stream numbers: other connections write such, too."""

    async def write(
        self, *, subject: str, payload: bytes, reason: str, stream: str = "", sequence: int = 0
    ) -> None:
        """Put one message aside; `stream` is empty where it came by core NATS."""
        self.num_written += 1
        where = f"{stream} {sequence}" if stream else "core NATS"
        log.warning("dead letter from %s (%s): %s", subject, where, reason)
        letter = DeadLetter(
            id=message_id(DeadLetter.tag(), stream, sequence or self._unnumbered()),
            pipeline=self._pipeline_of(subject),
            stream=stream,
            subject=subject,
            stream_sequence=sequence,
            reason=reason,
            payload=payload[:PAYLOAD_BYTES],
        )
        try:
            async with asyncio.timeout(STORE_TIMEOUT_S):
                await self._publisher.store(
                    self._subjects.record(letter), encode(letter), letter.id, wait_when_full=False
                )
        except (BusError, TimeoutError) as error:
            log.error("dead letter from %s dropped: %s", subject, error)

    def _unnumbered(self) -> str:
        return f"{self._writer}-{self.num_written}"

    def _pipeline_of(self, subject: str) -> str:
        """The token after ``<prefix>.<kind>.``; empty for the cluster's subjects."""
        tokens = subject.removeprefix(f"{self._subjects.prefix}.").split(".")
        return tokens[1] if len(tokens) > 2 and tokens[1] != "_cluster" else ""
