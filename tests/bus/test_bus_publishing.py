"""Storing messages: sizes, repeats, full streams, clients that close."""

import asyncio
import os
import signal

import msgspec
import pytest
from bus_samples import (
    WORKER,
    a_command,
    an_event,
    dead_letters,
    events_after,
    in_background,
    until,
)

from jigsawrl.bus.base import MessageTooLargeError, StreamFullError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.codec import encode
from jigsawrl.contract.commands import Drop
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES
from tests.freezing import freeze


async def test_a_message_that_is_too_large_only_with_its_header_is_refused_and_the_bus_goes_on(bus):
    empty = len(encode(an_event(1, reason="x" * 100_000))) - 100_000
    event = an_event(1, reason="x" * (MAX_PAYLOAD_BYTES - empty))
    assert len(encode(event)) <= MAX_PAYLOAD_BYTES
    generation = bus.connection.generation
    async with asyncio.timeout(5):
        with pytest.raises(MessageTooLargeError, match="max_payload"):
            await bus.publish_event(event)
    assert await bus.publish_event(an_event(2)) == 1
    assert bus.connection.generation == generation


async def test_a_message_that_is_too_large_is_a_dead_letter(bus):
    with pytest.raises(MessageTooLargeError):
        await bus.publish_event(an_event(1, reason="x" * MAX_PAYLOAD_BYTES))
    letters = await dead_letters(bus)
    assert [letter.subject for letter in letters] == [bus.subjects.event(an_event(1))]
    assert "bytes with headers" in letters[0].reason


async def test_a_message_that_just_fits_with_its_header_is_stored(bus):
    trace = b"traceparent: " + b"x" * 55 + b"\r\n"
    header = len(b"NATS/1.0\r\nNats-Msg-Id: e:1\r\n" + trace + b"\r\n")
    empty = len(encode(an_event(1, reason="x" * 100_000))) - 100_000
    event = an_event(1, reason="x" * (MAX_PAYLOAD_BYTES - empty - header))
    assert len(encode(event)) + header == MAX_PAYLOAD_BYTES
    assert await bus.publish_event(event) == 1


async def test_a_client_that_the_server_closed_for_good_is_replaced(bus):
    reading = bus.read_events(0)
    await bus.publish_event(an_event(1))
    assert (await anext(reading)).sequence == 1
    link = await bus.connection.ready()
    # Payload and header together exceed max_payload: the server answers -ERR, nats-py gives up.
    await link.client.publish("x", b"x" * MAX_PAYLOAD_BYTES, headers={"A": "b"})
    await until(lambda: link.client.is_closed)
    async with asyncio.timeout(10):
        assert await bus.publish_event(an_event(2)) == 2
        assert (await anext(reading)).sequence == 2
    await reading.aclose()


async def test_what_was_stored_by_a_publish_that_timed_out_is_not_stored_twice(
    own_server: EmbeddedServer, own_bus: NatsBus
):
    freeze(own_server.pid)
    try:
        publishing = asyncio.create_task(own_bus.publish_event(an_event(1)))
        await asyncio.sleep(7)
        assert not publishing.done()
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert await asyncio.wait_for(publishing, 10) == 1
    await own_bus.publish_event(an_event(2))
    assert (await own_bus.fill(own_bus.subjects.events_stream().name)).num_messages == 2


async def test_a_repeat_under_the_same_id_gives_the_first_sequence(bus):
    first = await bus.publish_event(an_event(1))
    await bus.publish_event(an_event(2))
    assert await bus.publish_event(an_event(1)) == first


async def test_publishers_wait_for_a_full_stream_and_nothing_is_lost(bus):
    spec = msgspec.structs.replace(bus.subjects.events_stream(), max_bytes=64 * 1024)
    await bus.create_streams([spec])
    seen: list[str] = []

    async def publish_all() -> None:
        for number in range(30):
            await bus.publish_event(an_event(number, reason="x" * 10_000))

    async with in_background(publish_all()) as publishing:
        await asyncio.sleep(0.5)
        num_stored = (await bus.fill(spec.name)).num_messages
        assert 0 < num_stored < 30
        assert [event.sequence for event in await events_after(bus, 0, 1)] == [1]
        reading = bus.read_events(0)
        while len(seen) < 30:
            async with asyncio.timeout(10):
                stored = await anext(reading)
            seen.append(stored.event.id)
            if stored.sequence % 5 == 0:
                await asyncio.sleep(0.1)
                await bus.purge(spec.name, before=stored.sequence + 1)
        await reading.aclose()
        await publishing
    assert seen == [f"e:{number}" for number in range(30)]


async def test_commands_wait_for_a_full_stream_until_their_boots_ack(bus):
    spec = msgspec.structs.replace(bus.subjects.commands_stream(), max_bytes=4 * 1024)
    await bus.create_streams([spec])
    await bus.bind_commands(WORKER)
    seen: list[str] = []

    async def handle(command: Drop) -> None:
        seen.append(command.id)

    async def publish_all() -> None:
        for number in range(40):
            await bus.publish_command(a_command(number))

    async with in_background(publish_all()) as publishing:
        await asyncio.sleep(0.5)
        assert 0 < (await bus.fill(spec.name)).num_messages < 40
        assert not publishing.done()
        async with in_background(bus.consume_commands(WORKER, handle)):
            await until(lambda: len(seen) == 40)
            await publishing
    assert seen == [f"c:{number}" for number in range(40)]


async def test_a_dead_letter_for_a_full_stream_is_logged_and_dropped(bus, caplog):
    spec = msgspec.structs.replace(bus.subjects.dead_letters_stream(), max_bytes=64)
    await bus.create_streams([spec])
    subject = f"{bus.subjects.prefix}.event.p.unknown"
    await bus.connection.call("publish", lambda js: js.publish(subject, b"\xc1"))
    await bus.publish_event(an_event(1))
    async with asyncio.timeout(4):  # It does not wait for room.
        stored = await events_after(bus, 0, 2)
    assert [message.event for message in stored] == [None, an_event(1)]
    assert bus.num_dead_letters == 1
    assert f"dead letter from {subject} dropped" in caplog.text
    assert (await bus.fill(spec.name)).num_messages == 0


async def test_a_snapshot_that_does_not_fit_is_refused_at_once(bus):
    spec = msgspec.structs.replace(bus.subjects.snapshots_stream(), max_bytes=1024)
    await bus.create_streams([spec])
    with pytest.raises(StreamFullError):
        await bus.save_snapshot(b"x" * 4096)


async def test_publishing_goes_on_over_a_restart_of_the_server(
    own_server: EmbeddedServer, own_bus: NatsBus, restart
):
    publishing = asyncio.create_task(_publish_numbered(own_bus, 300))
    await asyncio.sleep(0.05)
    own_server.kill()
    await asyncio.sleep(0.3)
    await restart(own_server)
    # Well under the time-out of one try: the loss of the connection ends it.
    await asyncio.wait_for(publishing, 4)
    stored = await events_after(own_bus, 0, 300)
    assert [event.event.id for event in stored] == [f"e:{number}" for number in range(300)]
    assert (await own_bus.fill(own_bus.subjects.events_stream().name)).num_messages == 300


async def test_the_client_waits_for_a_server_that_is_away_for_long(own_server, own_bus, restart):
    client = (await own_bus.connection.ready()).client
    own_server.kill()
    await asyncio.sleep(2)
    await restart(own_server)
    assert await own_bus.publish_event(an_event(1)) == 1
    assert (await own_bus.connection.ready()).client is client


async def _publish_numbered(bus: NatsBus, num: int) -> None:
    for number in range(num):
        await bus.publish_event(an_event(number))
