"""Requests, replies and telemetry over core NATS."""

import asyncio

import pytest
from bus_samples import dead_letters, in_background, take, until

from jigsawrl.bus.base import BusError, NoAnswerError
from jigsawrl.bus.client import connect
from jigsawrl.contract.requests import Activity, HeldOut, HeldOutQuery, Score, Scores
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES


def a_query(number: int = 0) -> HeldOutQuery:
    return HeldOutQuery(id=f"q:{number}", start=number, count=1)


async def answer(query: HeldOutQuery) -> HeldOut:
    return HeldOut(id=f"a:{query.id}", problems=(), total=query.start)


def an_activity(number: int) -> Activity:
    return Activity(
        id=f"a:{number}",
        pipeline="p",
        worker="p.trainer0",
        activity="warm-up",
        num_done=number,
        num_total=None,
        detail="",
    )


async def test_a_request_is_answered(bus):
    async with in_background(bus.serve("p.environment", answer)):
        reply = await bus.request("p.environment", a_query(3), timeout_s=5)
    assert reply.total == 3


async def test_a_request_before_the_service_is_there_is_asked_again(bus):
    asking = asyncio.create_task(bus.request("p.environment", a_query(3), timeout_s=5))
    await asyncio.sleep(0.3)
    async with in_background(bus.serve("p.environment", answer)):
        assert (await asking).total == 3


async def test_a_request_that_nobody_answers_says_so(bus):
    with pytest.raises(NoAnswerError, match=r"request\.nobody within 0\.5 s") as caught:
        await bus.request("nobody", a_query(), timeout_s=0.5)
    assert not caught.value.is_served


async def test_a_service_that_is_there_and_silent_is_told_from_one_that_is_not(bus):
    async def silent(query: HeldOutQuery) -> HeldOut:
        await asyncio.Event().wait()
        raise AssertionError("never set")

    async with in_background(bus.serve("p.environment", silent)):
        with pytest.raises(NoAnswerError) as caught:
            await bus.request("p.environment", a_query(), timeout_s=1.2)
    assert caught.value.is_served


@pytest.mark.parametrize("error", [ValueError("no such problem"), RuntimeError("no such problem")])
async def test_what_a_handler_raises_refuses_the_request_and_the_service_lives_on(bus, error):
    async def handler(query: HeldOutQuery) -> HeldOut:
        if query.start == 0:
            raise error
        return await answer(query)

    async with in_background(bus.serve("p.environment", handler)):
        with pytest.raises(BusError, match="no such problem"):
            await bus.request("p.environment", a_query(0), timeout_s=5)
        assert (await bus.request("p.environment", a_query(1), timeout_s=5)).total == 1


async def test_an_undecodable_request_is_refused_and_a_dead_letter(bus):
    async with in_background(bus.serve("p.environment", answer)):
        with pytest.raises(BusError, match="can't be read"):
            # A reply is no request.
            await bus.request("p.environment", await answer(a_query()), timeout_s=5)
    [letter] = await dead_letters(bus)
    assert letter.subject == bus.subjects.request("p.environment")
    assert letter.pipeline == "p"


async def test_a_message_that_asks_for_no_answer_is_a_dead_letter_and_the_service_lives_on(bus):
    async with in_background(bus.serve("p.environment", answer)):
        await bus.request("p.environment", a_query(), timeout_s=5)
        client = (await bus.connection.ready()).client
        await client.publish(bus.subjects.request("p.environment"), b"anything")
        assert (await bus.request("p.environment", a_query(4), timeout_s=5)).total == 4
        assert [letter.reason for letter in await dead_letters(bus)] == ["no reply subject"]


async def test_dead_letters_of_two_connections_do_not_hide_each_other(nats_server, bus, prefix):
    other = await connect(nats_server.url, name="other", prefix=prefix)
    async with in_background(bus.serve("a", answer)), in_background(other.serve("b", answer)):
        client = (await bus.connection.ready()).client
        for target in ("a", "b"):
            await bus.request(target, a_query(), timeout_s=5)
            await client.request(bus.subjects.request(target), b"\xc1", timeout=5)
        assert len(await dead_letters(bus)) == 2
    await other.close()


async def test_an_answer_that_is_too_large_becomes_a_refusal(bus):
    async def handler(query: HeldOutQuery) -> Scores:
        text = "x" * MAX_PAYLOAD_BYTES
        return Scores(id="s", scores=(Score(reward=0.0, correct=False, response_text=text),))

    async with in_background(bus.serve("p.reward", handler)):
        with pytest.raises(BusError, match="max_payload"):
            await bus.request("p.reward", a_query(), timeout_s=5)


async def test_no_more_requests_are_handled_at_once_than_allowed(bus):
    working, most = 0, 0

    async def handler(query: HeldOutQuery) -> HeldOut:
        nonlocal working, most
        working += 1
        most = max(most, working)
        await asyncio.sleep(0.02)
        working -= 1
        return await answer(query)

    async with in_background(bus.serve("p.environment", handler, concurrency=3)):
        await asyncio.gather(
            *(bus.request("p.environment", a_query(n), timeout_s=9) for n in range(20))
        )
    assert most == 3


async def test_serving_and_watching_go_on_with_a_new_client(bus):
    watching = bus.watch_activities("p")
    first = asyncio.ensure_future(anext(watching))
    async with in_background(bus.serve("p.environment", answer)):
        assert (await bus.request("p.environment", a_query(1), timeout_s=5)).total == 1
        link = await bus.connection.ready()
        await link.client.publish("x", b"x" * MAX_PAYLOAD_BYTES, headers={"A": "b"})
        await until(lambda: link.client.is_closed)
        assert (await bus.request("p.environment", a_query(2), timeout_s=9)).total == 2
        for number in range(100):
            bus.publish_activity(an_activity(number))
            await asyncio.sleep(0.02)
            if first.done():
                break
        assert (await first).activity == "warm-up"
    await watching.aclose()


async def test_activities_of_one_or_all_pipelines_arrive(bus):
    one, every = bus.watch_activities("p"), bus.watch_activities(None)
    arriving = [asyncio.create_task(take(reading, 2)) for reading in (one, every)]
    await asyncio.sleep(0.2)
    bus.publish_activity(an_activity(0))
    bus.publish_activity(an_activity(1))
    for activities in await asyncio.gather(*arriving):
        assert activities == [an_activity(0), an_activity(1)]
    await one.aclose()
    await every.aclose()


async def test_telemetry_never_waits_for_a_server_that_is_away(own_server, own_bus):
    own_server.kill()
    for number in range(5000):
        own_bus.publish_activity(an_activity(number))
