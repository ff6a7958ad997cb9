"""The traceparent of each message on a real server: sent, received, carried over."""

import asyncio

import pytest
from bus_samples import (
    WORKER,
    a_command,
    a_record,
    an_event,
    in_background,
    some_weights,
    until,
)
from nats.aio.msg import Msg

from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.commands import Drop
from jigsawrl.contract.requests import Activity, StatusQuery, Submitted
from jigsawrl.tracing import HEADER, Traces, current_trace_id, trace_id_in


@pytest.fixture
async def seen(bus: NatsBus) -> list[Msg]:
    """Every message under the test's prefix, as the server passes it on."""
    link = await bus.connection.ready()
    messages: list[Msg] = []

    async def on_message(message: Msg) -> None:
        messages.append(message)

    await link.client.subscribe(f"{bus.subjects.prefix}.>", cb=on_message)
    await link.client.flush()
    return messages


def trace_of(message: Msg) -> str | None:
    return trace_id_in((message.headers or {}).get(HEADER))


async def test_every_message_has_a_traceparent_made_of_its_ids(
    bus: NatsBus, seen: list[Msg]
) -> None:
    manifest, payload = some_weights(10)
    activity = Activity(
        id="a", pipeline="p", worker="w", activity="", num_done=0, num_total=None, detail=""
    )
    await bus.publish_event(an_event(1))
    await bus.store(a_record(1))
    await bus.publish_weights(manifest, memoryview(payload))
    await bus.save_snapshot(b"state")
    bus.publish_activity(activity)
    await until(lambda: len(seen) == 6)
    assert all(trace_of(message) for message in seen)
    headers = {message.subject.rpartition(".")[2]: message.headers for message in seen}
    assert headers["pipeline_cancelled"][HEADER] == Traces().headers("e:1")[HEADER]
    chunk, whole = headers["weight_chunk"], headers["weight_manifest"]
    assert trace_id_in(chunk[HEADER]) == trace_id_in(whole[HEADER])


async def test_a_repeated_message_repeats_its_header(bus: NatsBus, seen: list[Msg]) -> None:
    for _ in range(2):
        await bus.publish_event(an_event(1))
    await until(lambda: len(seen) == 2)
    assert seen[0].headers == seen[1].headers


async def test_what_a_worker_does_about_a_command_is_in_the_commands_trace(
    bus: NatsBus, seen: list[Msg]
) -> None:
    handled = []

    async def handle(command: Drop) -> None:
        handled.append(current_trace_id())
        await bus.publish_event(an_event(1))

    await bus.bind_commands(WORKER)
    async with in_background(bus.consume_commands(WORKER, handle)):
        await bus.publish_command(a_command(1))
        await until(lambda: len(seen) == 2 and bool(handled))
    command, event = seen
    assert command.subject.endswith(".drop")
    assert trace_of(command) == trace_of(event) == handled[0]
    assert command.headers[HEADER] != event.headers[HEADER], "each has a span id of its own"
    assert current_trace_id() is None


async def test_an_answer_is_in_the_trace_of_its_question(bus: NatsBus, seen: list[Msg]) -> None:
    handled, answers = [], []
    link = await bus.connection.ready()

    async def on_answer(message: Msg) -> None:
        answers.append(message)

    async def answer(query: StatusQuery) -> Submitted:
        handled.append(current_trace_id())
        return Submitted(id=f"submitted:{query.id}", cause=query.id, error=None)

    await link.client.subscribe("_INBOX.>", cb=on_answer)
    async with in_background(bus.serve("t", answer)):
        async with asyncio.timeout(10):
            await bus.request("t", StatusQuery(id="q"), timeout_s=5)
        await until(lambda: any(trace_of(message) for message in answers))
    (reply,) = (message for message in answers if trace_of(message))
    assert trace_of(seen[0]) == handled[0] == trace_of(reply)
