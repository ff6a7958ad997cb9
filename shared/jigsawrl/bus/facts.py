"""What a server and its streams are like, for people: `jigsaw doctor` asks. Reads only.

JetStream says the time in each answer about a stream; that is the one clock that all machines of a
cluster see alike.
"""

from __future__ import annotations

import json
import time
from datetime import datetime

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, StreamInfo

from jigsawrl.bus.base import BusError
from jigsawrl.bus.connection import RETRYABLE, Connection, Link, describe
from jigsawrl.contract.streams import Subjects

ANSWER_TIMEOUT_S = 3.0
"""A server that is well answers within milliseconds."""

PAGE = 256
"""Streams in one answer of the server, at most."""


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One stream."""

    name: str
    num_messages: int
    num_bytes: int
    max_bytes: int
    """0 where it is not bounded."""
    refuses_when_full: bool
    """Otherwise it drops the oldest messages."""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One server, as a client of it sees it."""

    version: str
    max_payload_bytes: int
    without_jetstream: str | None
    """Why JetStream does not answer; None where it does."""
    num_bytes: int = 0
    """Stored by this account."""
    max_bytes: int | None = None
    """That it may store."""
    streams: tuple[StreamFacts, ...] = ()
    """Of the one system; others may use the server, too."""
    clock_skew_s: float | None = None
    """Clock of this machine less the server's; None where there is no stream to ask about."""


async def server_facts(connection: Connection, subjects: Subjects) -> ServerFacts:
    """Raises `BusError` where the connection is gone."""
    link = await connection.ready()
    version = link.client.connected_server_version
    facts = ServerFacts(
        version=f"{version.major}.{version.minor}.{version.patch}",
        max_payload_bytes=link.client.max_payload,
        without_jetstream=None,
    )
    try:
        account = await connection.call(
            "ask about JetStream", lambda js: js.account_info(), deadline_s=ANSWER_TIMEOUT_S
        )
        infos = await _streams(connection)
    except (BusError, nats.js.errors.Error) as error:
        reason = str(error) if isinstance(error, BusError) else describe(error)
        return msgspec.structs.replace(facts, without_jetstream=reason)
    events = subjects.events_stream().name
    prefix = events.removesuffix("EVENTS")
    ours = [info for info in infos if (info.config.name or "").startswith(prefix)]
    is_there = any(info.config.name == events for info in ours)
    return msgspec.structs.replace(
        facts,
        num_bytes=account.storage,
        max_bytes=account.limits.max_storage if account.limits.max_storage > 0 else None,
        streams=tuple(map(_stream_facts, ours)),
        clock_skew_s=await _clock_skew_s(link, events) if is_there else None,
    )


async def _streams(connection: Connection) -> list[StreamInfo]:
    found: list[StreamInfo] = []
    while True:
        start = len(found)
        page = await connection.call(
            "list the streams",
            lambda js, start=start: js.streams_info(offset=start),  # type: ignore[misc]
            deadline_s=ANSWER_TIMEOUT_S,
        )
        found += page
        if len(page) < PAGE:
            return found


def _stream_facts(info: StreamInfo) -> StreamFacts:
    return StreamFacts(
        name=info.config.name or "",
        num_messages=info.state.messages,
        num_bytes=info.state.bytes,
        max_bytes=max(0, info.config.max_bytes or 0),
        refuses_when_full=info.config.discard == DiscardPolicy.NEW,
    )


async def _clock_skew_s(link: Link, stream: str) -> float | None:
    """The answer was made half a round trip before it came."""
    asked_s = time.time()
    start = time.monotonic()
    try:
        answer = await link.client.request(
            f"$JS.API.STREAM.INFO.{stream}", b"", timeout=ANSWER_TIMEOUT_S
        )
    except (*RETRYABLE, nats.errors.Error):
        return None
    stamp = json.loads(answer.data).get("ts")
    if not isinstance(stamp, str):
        return None
    # Go writes up to nine digits of a second, Python reads six.
    whole, _, fraction = stamp.removesuffix("Z").partition(".")
    server_s = datetime.fromisoformat(f"{whole}.{fraction[:6].ljust(6, '0')}+00:00").timestamp()
    return asked_s + (time.monotonic() - start) / 2 - server_s
