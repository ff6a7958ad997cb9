"""What a real server lets each role do: its own work, nothing else, and that at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from bus_samples import (
    WORKER,
    a_command,
    a_group,
    a_record,
    an_event,
    some_weights,
    take,
    until,
)
from secured import connect_as

from jigsawrl.bus.base import BusError, PermissionDeniedError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.events import (
    CheckpointCommitted,
    SequencesRewarded,
    Tick,
    WeightsLoaded,
    WorkerExited,
)
from jigsawrl.contract.message import Ref
from jigsawrl.contract.requests import (
    StatusQuery,
)

Act = Callable[[NatsBus], Awaitable[Any]]

WITHIN_S = 20
"""Without an answer at once these wait for 30 s or for ever."""


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
        lambda bus: bus.store(a_group()),
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


async def test_inboxes_of_another_role_are_closed(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    bus = await connect_as("rollout", secured_server, credentials / "red")
    link = await bus.connection.ready()
    await link.client.subscribe("_INBOX.client.>")
    with pytest.raises(PermissionDeniedError, match=r"subscribe to _inbox\.client"):
        await bus.connection.subscribed(link, "_INBOX.client.>")
    await bus.close()


async def test_a_connection_with_rights_withdrawn_says_so_in_a_call(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    """A JetStream call names its purpose through the subject, not as a time-out."""
    bus = await connect_as("node", secured_server, credentials / "red")
    with pytest.raises(BusError, match=r"may not publish on \$JS\.API\.STREAM\.CREATE\.JIG_DATA_p"):
        await bus.create_streams([bus.subjects.data_stream("p")])
    await bus.close()
