"""Roles at work on a server with credentials: what the table lets them do, they can do."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from bus_samples import (
    WORKER,
    a_command,
    a_group,
    a_record,
    an_event,
    in_background,
    some_weights,
    take,
    until,
)
from secured import connect_as

from jigsawrl.bus.base import PermissionDeniedError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer, start_server
from jigsawrl.cli.credentials import server_tls
from jigsawrl.contract.events import (
    Heartbeat,
)
from jigsawrl.contract.message import Worker, message_id
from jigsawrl.contract.requests import (
    Activity,
    ScoreQuery,
    Scores,
    StatusQuery,
    Submitted,
)
from tests.conftest import small_streams

WITHIN_S = 20
"""For what comes at once."""

NODE = Worker(id="node0", boot="b")


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
    ref = await buses["environment"].store(a_group())
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
