"""What a real server lets each role do: its own work, nothing else, and that at once."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from bus_samples import (
    WORKER,
    a_command,
    a_record,
    an_event,
    in_background,
    some_weights,
    take,
    until,
)
from secured import connect_as

from jigsawrl.bus.base import BusError, PermissionDeniedError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer, start_server
from jigsawrl.cli.credentials import server_tls
from jigsawrl.contract.events import (
    CheckpointCommitted,
    Heartbeat,
    SequencesRewarded,
    Tick,
    WeightsLoaded,
    WorkerExited,
)
from jigsawrl.contract.message import Array, Ref, Worker, message_id
from jigsawrl.contract.records import GroupRecord
from jigsawrl.contract.requests import (
    Activity,
    ScoreQuery,
    Scores,
    StatusQuery,
    Submitted,
)
from tests.conftest import small_streams

Act = Callable[[NatsBus], Awaitable[Any]]

WITHIN_S = 20
"""Without an answer at once these wait for 30 s or for ever."""

NODE = Worker(id="node0", boot="b")


def group_record() -> GroupRecord:
    return GroupRecord(
        id="g:1",
        pipeline="p",
        group="p/g0",
        epoch=0,
        cursor=0,
        prompt_tokens=Array.of("int32", [1]),
        prompt_text="",
        problem={},
    )


def a_tick() -> Tick:
    return Tick(id="tick:1")


def weights_loaded() -> WeightsLoaded:
    return WeightsLoaded(id="w:1", pipeline="p", worker=WORKER, incarnation=0, version=0)


def committed() -> CheckpointCommitted:
    return CheckpointCommitted(
        id="k:1", pipeline="p", worker=WORKER, gang_epoch=0, incarnation=0, version=0, path="x"
    )


def rewarded() -> SequencesRewarded:
    return SequencesRewarded(id="s:1", pipeline="p", worker=WORKER, rewarded=())


def exited() -> WorkerExited:
    return WorkerExited(id="x:1", pipeline="p", worker=WORKER, exit_code=1, reason="")


async def read_events(bus: NatsBus) -> None:
    await take(bus.read_events(0), 1)


async def watch(bus: NatsBus) -> None:
    await take(bus.watch_activities("p"), 1)


async def publish_weights(bus: NatsBus) -> None:
    manifest, payload = some_weights(1000)
    await bus.publish_weights(manifest, memoryview(payload))


def commands(bus: NatsBus) -> Awaitable[Any]:
    return bus.publish_command(a_command(1))


def lease(bus: NatsBus) -> Awaitable[Any]:
    return bus.acquire_lease("scheduler", "me")


def streams(bus: NatsBus) -> Awaitable[Any]:
    return bus.create_streams(bus.subjects.cluster_streams())


def deletes(bus: NatsBus) -> Awaitable[Any]:
    return bus.delete_streams([bus.subjects.data_stream("p").name])


def purges_events(bus: NatsBus) -> Awaitable[Any]:
    return bus.purge(bus.subjects.events_stream().name, before=1)


def snapshots(bus: NatsBus) -> Awaitable[Any]:
    return bus.load(Ref(bus.subjects.snapshots_stream().name, 1))


def serves_scheduler(bus: NatsBus) -> Awaitable[Any]:
    return bus.serve("scheduler", lambda asked: asyncio.sleep(0))  # type: ignore[arg-type]


def serves_reward(bus: NatsBus) -> Awaitable[Any]:
    return bus.serve("p.reward", lambda asked: asyncio.sleep(0))  # type: ignore[arg-type]


def asks_scheduler(bus: NatsBus) -> Awaitable[Any]:
    return bus.request("scheduler", StatusQuery(id="q:1"), timeout_s=60)


FORBIDDEN: dict[str, list[Act]] = {
    "rollout": [
        commands,
        lease,
        streams,
        deletes,
        purges_events,
        snapshots,
        read_events,
        watch,
        publish_weights,
        serves_scheduler,
        serves_reward,
        asks_scheduler,
        lambda bus: bus.publish_event(committed()),
        lambda bus: bus.publish_event(an_event(1)),
        lambda bus: bus.store(a_record(1)),
    ],
    "evaluation": [
        commands,
        publish_weights,
        lambda bus: bus.publish_event(weights_loaded()),
        lambda bus: bus.store(a_record(1)),
    ],
    "trainer": [
        commands,
        lease,
        read_events,
        snapshots,
        purges_events,
        lambda bus: bus.publish_event(rewarded()),
        lambda bus: bus.store(a_record(1)),
    ],
    "reward": [
        commands,
        publish_weights,
        lambda bus: bus.publish_event(committed()),
        lambda bus: bus.store(group_record()),
    ],
    "environment": [
        commands,
        serves_reward,
        publish_weights,
        lambda bus: bus.publish_event(rewarded()),
        lambda bus: bus.store(a_record(1)),
    ],
    "node": [
        commands,
        lease,
        snapshots,
        lambda bus: bus.load(Ref(bus.subjects.data_stream("p").name, 1)),
        lambda bus: bus.publish_event(a_tick()),
        lambda bus: bus.store(a_record(1)),
    ],
    "scheduler": [
        publish_weights,
        serves_reward,
        lambda bus: bus.publish_event(exited()),
        lambda bus: bus.store(a_record(1)),
    ],
    "client": [
        commands,
        streams,
        snapshots,
        purges_events,
        read_events,
        serves_scheduler,
        lambda bus: bus.publish_event(an_event(1)),
        lambda bus: bus.bind_commands(WORKER),
    ],
}

CASES = [
    pytest.param(role, act, id=f"{role}-{getattr(act, '__name__', number)}-{number}")
    for role, acts in FORBIDDEN.items()
    for number, act in enumerate(acts)
]


@pytest.mark.parametrize(("role", "act"), CASES)
async def test_what_a_role_may_not_do_is_refused_at_once_and_says_why(
    role: str, act: Act, credentials: Path, secured_server: EmbeddedServer
) -> None:
    bus = await connect_as(role, secured_server, credentials / "red")
    try:
        async with asyncio.timeout(WITHIN_S):
            with pytest.raises((PermissionDeniedError, ExceptionGroup)) as caught:
                await act(bus)
    finally:
        await bus.close()
    error = caught.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, PermissionDeniedError)
    assert f"role {role} of group red may not" in str(error)
    assert f"{role}.pem" in str(error)


async def test_groups_do_not_see_one_another(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    red = await connect_as("scheduler", secured_server, credentials / "red")
    blue = await connect_as("scheduler", secured_server, credentials / "blue")
    num_before = (await blue.fill("JIG_EVENTS")).num_messages
    await red.publish_event(an_event(1001))
    assert (await blue.fill("JIG_EVENTS")).num_messages == num_before
    await blue.create_streams([blue.subjects.data_stream("theirs", max_bytes=1 << 20)])
    assert (await red.fill(red.subjects.data_stream("theirs").name)).max_bytes == 0
    await blue.delete_streams([blue.subjects.data_stream("theirs").name])
    for bus in (red, blue):
        await bus.close()


async def test_what_waits_when_rights_are_missing_is_told_in_flight(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    bus = await connect_as("rollout", secured_server, credentials / "red")
    async with asyncio.timeout(WITHIN_S):
        results = await asyncio.gather(
            bus.publish_command(a_command(1)),
            bus.publish_event(weights_loaded()),
            bus.publish_command(a_command(2)),
            return_exceptions=True,
        )
    assert isinstance(results[0], PermissionDeniedError)
    assert isinstance(results[1], int)
    assert isinstance(results[2], PermissionDeniedError)
    assert "jig.command.p.rollout0.b1.drop" in str(results[0])
    await bus.close()


async def test_a_denied_report_is_told_once_and_stops_nothing(
    credentials: Path, secured_server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await connect_as("scheduler", secured_server, credentials / "red")
    link = await bus.connection.ready()
    for _ in range(3):
        await link.client.publish("jig.data.p.group_record", b"x")
    await until(lambda: "role scheduler of group red may not" in caplog.text)
    assert await bus.publish_event(an_event(2001)) > 0
    assert caplog.text.count("may not publish on jig.data.p.group_record") == 1
    await bus.close()


async def test_rights_that_are_withdrawn_end_what_pulls_with_the_reason(
    credentials: Path, tmp_path: Path
) -> None:
    server = await start_server(tmp_path, tls=server_tls(credentials))
    leader = await connect_as("scheduler", server, credentials / "red")
    await leader.create_streams(small_streams(leader))
    node = await connect_as("node", server, credentials / "red")
    await node.bind_commands(NODE)
    got = asyncio.Event()

    async def take_command(command: Any) -> None:
        got.set()

    consuming = asyncio.create_task(node.consume_commands(NODE, take_command))
    await leader.publish_command(a_command(1, worker=NODE))
    await asyncio.wait_for(got.wait(), WITHIN_S)
    config = tmp_path / "nats-server.conf"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "MSG.NEXT.JIG_COMMANDS" not in line))
    os.kill(server.pid, signal.SIGHUP)
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(PermissionDeniedError, match=r"MSG\.NEXT\.JIG_COMMANDS|msg\.next\.jig"):
            await consuming
    await node.close()
    await leader.close()
    server.stop()


async def test_a_program_in_any_language_watches_with_a_clients_file(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    """As docs/security.md says, with what every NATS library offers."""
    context = ssl.create_default_context(cafile=credentials / "ca.pem")
    context.load_cert_chain(credentials / "red" / "client.pem")
    client = await nats.connect(secured_server.url, tls=context, inbox_prefix="_INBOX.client")
    events = await client.subscribe("jig.event.p.>")
    await client.flush()
    leader = await connect_as("scheduler", secured_server, credentials / "red")
    await leader.publish_event(an_event(3001))
    message = await events.next_msg(timeout=WITHIN_S)
    assert msgspec.msgpack.decode(message.data)["id"] == "e:3001"
    await leader.close()
    await client.close()


async def test_inboxes_of_another_role_are_closed(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    bus = await connect_as("rollout", secured_server, credentials / "red")
    link = await bus.connection.ready()
    await link.client.subscribe("_INBOX.client.>")
    with pytest.raises(PermissionDeniedError, match=r"subscribe to _inbox\.client"):
        await bus.connection.subscribed(link, "_INBOX.client.>")
    await bus.close()


async def test_each_role_does_its_part_of_a_step(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    """Everything that the table lets a role do, once."""
    names = ("scheduler", "node", "rollout", "reward", "environment", "trainer", "client")
    buses = {role: await connect_as(role, secured_server, credentials / "red") for role in names}
    buses["evaluation"] = await connect_as("evaluation", secured_server, credentials / "red")
    got: list[str] = []

    async def take_command(command: Any) -> None:
        got.append(command.id)

    async def scores(asked: Any) -> Scores:
        return Scores(id=message_id(Scores.tag(), asked.id), scores=())

    async def status(asked: Any) -> Submitted:
        return Submitted(id=message_id(Submitted.tag(), asked.id), error=None)

    revision = await buses["scheduler"].acquire_lease("scheduler", "test")
    assert revision is not None
    assert await buses["scheduler"].renew_lease("scheduler", "test", revision)
    await buses["scheduler"].save_snapshot(b"state")
    assert await buses["scheduler"].load_snapshots() == [b"state"]
    await buses["node"].publish_event(Heartbeat(id="heartbeat:1", node=NODE))
    await buses["node"].bind_commands(NODE)
    await buses["rollout"].bind_commands(WORKER)
    await buses["scheduler"].publish_command(a_command(7))
    await buses["scheduler"].publish_command(a_command(8, worker=NODE))
    ref = await buses["environment"].store(group_record())
    assert (await buses["rollout"].load(ref)).group == "p/g0"
    ref = await buses["reward"].store(a_record(1))
    assert (await buses["trainer"].load(ref)).sequence == "1"
    manifest, payload = some_weights(3 * 1024 * 1024)
    ref = await buses["trainer"].publish_weights(manifest, memoryview(payload))
    for role in ("rollout", "evaluation"):
        assert bytes((await buses[role].fetch_weights(ref))[1]) == payload
    await buses["trainer"].retain_weights("p", {(0, 0)})
    async with (
        in_background(buses["rollout"].consume_commands(WORKER, take_command)),
        in_background(buses["node"].consume_commands(NODE, take_command)),
        in_background(buses["reward"].serve("p.reward", scores)),
        in_background(buses["scheduler"].serve("scheduler", status, shared=False)),
        in_background(watched(buses["client"], got)),
    ):
        query = ScoreQuery(id="score_query:1", answers=())
        await buses["evaluation"].request("p.reward", query, timeout_s=10)
        await buses["client"].request("scheduler", StatusQuery(id="q:1"), timeout_s=10)
        await until(lambda: {"c:7", "c:8"} <= set(got))
        while "activity:1" not in got:
            buses["rollout"].publish_activity(an_activity())
            await asyncio.sleep(0.05)
    events = await take(buses["scheduler"].read_events(0), 1)
    assert events[0].payload
    for bus in buses.values():
        await bus.close()


def an_activity() -> Activity:
    return Activity(
        id="activity:1",
        pipeline="p",
        worker="p.rollout0",
        activity="generate",
        num_done=0,
        num_total=None,
        detail="",
    )


async def watched(bus: NatsBus, got: list[str]) -> None:
    async for activity in bus.watch_activities(None):
        got.append(activity.id)


async def test_a_connection_with_rights_withdrawn_says_so_in_a_call(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    """A JetStream call names its purpose through the subject, not as a time-out."""
    bus = await connect_as("node", secured_server, credentials / "red")
    with pytest.raises(BusError, match=r"may not publish on \$JS\.API\.STREAM\.CREATE\.JIG_DATA_p"):
        await bus.create_streams([bus.subjects.data_stream("p")])
    await bus.close()
