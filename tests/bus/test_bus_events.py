"""Reading the event stream: order, no gaps, restarts, dead letters."""

import asyncio
import json
import os
import signal

import pytest
from bus_samples import an_event, dead_letters, events_after, in_background, take, until

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.codec import encode
from tests.freezing import freeze


async def test_stored_and_live_events_arrive_in_order_with_the_time_of_storing(bus):
    for number in range(3):
        await bus.publish_event(an_event(number))
    reading = bus.read_events(1)
    assert [event.sequence for event in await take(reading, 2)] == [2, 3]
    await bus.publish_event(an_event(3))
    stored = await anext(reading)
    assert (stored.sequence, stored.event) == (4, an_event(3))
    assert stored.payload == encode(an_event(3))
    message = await bus.connection.call(
        "get", lambda js: js.get_msg(bus.subjects.events_stream().name, 4, direct=True)
    )
    assert stored.timestamp_s == pytest.approx(message.time.timestamp(), abs=1e-3)
    await reading.aclose()


async def test_a_live_event_is_not_held_back_for_a_full_batch(bus):
    reading = bus.read_events(0)
    first = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0.3)
    await bus.publish_event(an_event(0))
    await asyncio.wait_for(first, 0.5)
    await reading.aclose()


async def test_a_reader_goes_on_after_the_server_was_killed_and_restarted(
    own_server: EmbeddedServer, own_bus: NatsBus, restart
):
    reading = own_bus.read_events(0)
    await own_bus.publish_event(an_event(0))
    assert (await anext(reading)).sequence == 1
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0.1)
    own_server.kill()
    await asyncio.sleep(0.3)
    await restart(own_server)
    await own_bus.publish_event(an_event(1))
    assert (await asyncio.wait_for(waiting, 6)).sequence == 2
    await reading.aclose()


async def test_a_reader_whose_consumer_vanished_silently_makes_a_new_one(bus):
    reading = bus.read_events(0)
    await bus.publish_event(an_event(0))
    await anext(reading)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0.1)
    stream = bus.subjects.events_stream().name
    consumers = await bus.connection.call("list", lambda js: js.consumers_info(stream))
    await bus.connection.call("delete", lambda js: js.delete_consumer(stream, consumers[0].name))
    await bus.publish_event(an_event(1))
    assert (await asyncio.wait_for(waiting, 6)).sequence == 2
    await reading.aclose()


async def test_a_reader_notices_a_stalled_pull_and_asks_again(own_server, own_bus):
    reading = own_bus.read_events(0)
    await own_bus.publish_event(an_event(0))
    await anext(reading)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0.1)
    consumers = await _consumers(own_bus)
    freeze(own_server.pid)
    await asyncio.sleep(3.6)
    os.kill(own_server.pid, signal.SIGCONT)
    await own_bus.publish_event(an_event(1))
    assert (await asyncio.wait_for(waiting, 6)).sequence == 2
    assert await _consumers(own_bus) != consumers
    await reading.aclose()


async def _consumers(bus: NatsBus) -> set[str]:
    stream = bus.subjects.events_stream().name
    infos = await bus.connection.call("list", lambda js: js.consumers_info(stream))
    return {info.name for info in infos}


async def test_messages_that_went_astray_are_read_again(bus, nats_server):
    reading = bus.read_events(0)
    await bus.publish_event(an_event(0))
    await anext(reading)
    rest = asyncio.ensure_future(take(reading, 20))
    await asyncio.sleep(0.1)
    [consumer] = await _consumers(bus)
    thief = await connect(nats_server.url, name="thief", prefix=bus.subjects.prefix)
    link = await thief.connection.ready()
    stolen = await link.client.subscribe("stolen")
    request = json.dumps({"batch": 5, "expires": 4_000_000_000}).encode()
    subject = f"$JS.API.CONSUMER.MSG.NEXT.{bus.subjects.events_stream().name}.{consumer}"
    await link.client.publish(subject, request, "stolen")
    await link.client.flush()
    for number in range(1, 21):
        await bus.publish_event(an_event(number))
    assert [event.sequence for event in await rest] == list(range(2, 22))
    assert stolen.delivered > 0
    await thief.close()
    await reading.aclose()


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1nonsense", "MessagePack"),
        (b"\x82\xa4type\xa7unknown\xa2id\xa1x", "unknown"),
    ],
)
async def test_what_can_not_be_decoded_goes_to_the_dead_letters_and_reading_goes_on(
    bus, payload, reason
):
    await bus.publish_event(an_event(0))
    subject = f"{bus.subjects.prefix}.event.p.unknown"
    await bus.connection.call("publish", lambda js: js.publish(subject, payload))
    await bus.publish_event(an_event(2))
    stored = await events_after(bus, 0, 3)
    assert [event.event for event in stored] == [an_event(0), None, an_event(2)]
    assert bus.num_dead_letters == 1
    [letter] = await dead_letters(bus)
    assert reason in letter.reason
    assert (letter.pipeline, letter.subject) == ("p", subject)
    assert (letter.stream, letter.stream_sequence) == (bus.subjects.events_stream().name, 2)
    assert letter.payload == payload
    raw = await bus.connection.call("get", lambda js: js.get_msg(letter.stream, 2, direct=True))
    assert raw.data == payload


async def test_a_dead_letter_that_does_not_fit_is_counted_and_dropped(bus):
    await bus.delete_streams([bus.subjects.dead_letters_stream().name])
    subject = f"{bus.subjects.prefix}.event.p.unknown"
    await bus.connection.call("publish", lambda js: js.publish(subject, b"\xc1"))
    await bus.publish_event(an_event(1))
    stored = await events_after(bus, 0, 2)
    assert stored[1].event == an_event(1)
    assert bus.num_dead_letters == 1


async def test_reading_stops_when_the_bus_is_closed(own_bus):
    events: list[int] = []

    async def read() -> None:
        async for stored in own_bus.read_events(0):
            events.append(stored.sequence)

    async with in_background(read()) as reading:
        await own_bus.publish_event(an_event(0))
        await until(lambda: events == [1])
        await own_bus.close()
        await asyncio.wait_for(reading, 2)
