"""Reads a stream in order and without gaps, over restarts of server and client.

Used by `events` and `weights`. nats-py's ordered consumers stay silent after a server restart
(issue 510), hence our own: a consumer in memory without acks, its consecutive numbers checked, made
anew behind the last message read whenever the connection changed, a number is missing or nothing is
heard.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator

import nats.errors
import nats.js.errors
from nats.aio.msg import Msg
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from jigsawrl.bus.connection import RETRYABLE, Backoff, BusClosedError, Connection, log
from jigsawrl.bus.pulling import Delivery, Puller, PullLostError, delivery_of

INACTIVE_S = 30.0
"""The server forgets a reader that does not pull for so long."""


async def read_stream(
    connection: Connection,
    stream: str,
    *,
    after: int,
    subject: str | None = None,
    batch: int,
    to_end: bool,
) -> AsyncIterator[tuple[Delivery, Msg]]:
    """Messages with a sequence above `after` on `subject`; with `to_end` those stored now, else
    live ones too, until the bus is closed. Raises `NotFoundError` for a missing stream `to_end`."""
    last = after
    backoff = Backoff()
    while not connection.closing:
        try:
            async with _bound(connection, stream, after=last, subject=subject) as bound:
                puller, num_pending = bound
                if to_end and num_pending == 0:
                    return
                expected = 1
                while True:
                    for message in await puller.fetch(batch):
                        delivery = delivery_of(message)
                        if delivery.consumer_sequence != expected:
                            raise PullLostError("a message was lost on its way")
                        expected += 1
                        last = delivery.stream_sequence
                        backoff = Backoff()
                        yield delivery, message
                        if to_end and delivery.num_pending == 0:
                            return
        except BusClosedError:
            return
        except nats.js.errors.NotFoundError:
            if to_end:
                raise
            log.warning("reader of %s waits: the stream does not exist", stream)
        except (*RETRYABLE, PullLostError, nats.errors.Error) as error:
            log.debug("reader of %s binds anew after %d: %s", stream, last, error)
        await backoff.pause()


@contextlib.asynccontextmanager
async def _bound(
    connection: Connection, stream: str, *, after: int, subject: str | None
) -> AsyncIterator[tuple[Puller, int]]:
    name = f"reader-{uuid.uuid4().hex[:16]}"
    config = ConsumerConfig(
        name=name,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=after + 1,
        ack_policy=AckPolicy.NONE,
        filter_subject=subject,
        inactive_threshold=INACTIVE_S,
        mem_storage=True,
        num_replicas=1,
    )
    async with connection.attempt(4.0) as link:
        info = await link.js.add_consumer(stream, config)
    async with Puller(connection, link, stream=stream, consumer=name) as puller:
        yield puller, info.num_pending or 0
