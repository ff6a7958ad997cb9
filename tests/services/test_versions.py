"""Nodes of other versions at a real leader, and what people are told of them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from jigsawrl import __version__
from jigsawrl.bus.client import NatsBus
from jigsawrl.cli.status_text import overview
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Configure, StartTenant
from jigsawrl.contract.events import Heartbeat, NodeStarted
from jigsawrl.contract.message import Worker
from jigsawrl.contract.requests import NodeStatus
from jigsawrl.contract.spec import Device
from services.run import Context, Life
from services.tenant_metrics import TenantMetrics
from tests.services.scheduler_steps import (
    NODE,
    Start,
    collecting,
    config,
    start_node,
    status,
    submit,
    until,
)


def started(name: str, *, schema: int, clock_s: float | None = None) -> NodeStarted:
    return NodeStarted(
        id=f"started:{name}",
        schema=schema,
        node=Worker(id=name, boot="b"),
        devices=(Device(name, 0, "cpu", 1 << 33),),
        clock_s=clock_s,
    )


async def told(bus: NatsBus, name: str) -> NodeStatus:
    async with asyncio.timeout(10):
        while True:
            for node in (await status(bus)).nodes:
                if node.node == name:
                    return node


async def test_neighbours_work_and_others_are_refused_where_people_look(
    bus: NatsBus, leading: Start
) -> None:
    near = Worker(id="near", boot="b")
    with capture_logs() as lines:
        async with leading(), collecting(bus, near) as commands:
            await bus.publish_event(started("far", schema=3))
            for number in range(3):
                await bus.publish_event(
                    Heartbeat(id=f"h{number}", schema=3, node=Worker(id="far", boot="b"))
                )
            await bus.publish_event(started("near", schema=2))
            await submit(bus, config())
            await until(lambda: [x for x in commands if isinstance(x, StartTenant)])
            assert (await told(bus, "near")).state == "up"
            assert (await told(bus, "far")).state == "refused"
            text = list(overview(await status(bus)))
            assert bus.num_dead_letters == 0
    why = "far speaks schema 3 and the scheduler 1, more than 1 apart: upgrade the scheduler"
    assert [line for line in text if line.startswith(f"node refused: {why}")]
    warned = [line["event"] for line in lines if line["log_level"] == "warning"]
    assert [event for event in warned if event.startswith(why)] == [
        f"{why}, one schema at a time"
    ], "told once, not at every heartbeat"


async def test_a_clock_that_is_off_is_told_with_what_it_matters_for(
    bus: NatsBus, leading: Start
) -> None:
    with capture_logs() as lines:
        async with leading():
            await bus.publish_event(started("late", schema=1, clock_s=time.time() - 60))
            await bus.publish_event(started("right", schema=1, clock_s=time.time()))
            assert (await told(bus, "late")).clock_skew_s == pytest.approx(-60, abs=2)
            skew_s = (await told(bus, "right")).clock_skew_s
            assert skew_s is not None
            assert abs(skew_s) < 2
            text = "\n".join(overview(await status(bus)))
    assert "the clock of late is 60." in text
    assert "times in logs and traces do" in text
    assert "clock of right" not in text
    assert [line for line in lines if line["event"].startswith("the clock of late is 60.")]


async def test_a_worker_that_knows_no_such_configuration_refuses_it_by_the_key(
    bus: NatsBus,
) -> None:
    """What a newer client submitted travels unread to a worker."""

    class Idle:
        role = "environment"
        concurrency = 1

        async def configure(self, config: PipelineConfig, command: Configure) -> None:
            raise AssertionError("it was understood")

    worker = Worker(id="p.environment0", boot="b")
    context = Context(bus=bus, worker=worker, pipeline="p", run_folder=None, device=None)
    life = Life(context, Idle(), node=None, metrics=TenantMetrics())  # type: ignore[arg-type]
    newer: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(config()))
    payload = msgspec.msgpack.encode(newer | {"added_later": {"x": 1}})
    await life._configure(
        Configure(
            id="c", worker=worker, leader_epoch=1, config=payload, incarnation=0, gang_epoch=0
        )
    )
    assert life.refusal is not None
    assert "unknown field `added_later`" in life.refusal
    assert "upgrade its node" in life.refusal


async def test_a_leader_tells_its_version_and_policy(bus: NatsBus, leading: Start) -> None:
    async with leading():
        await start_node(bus)
        node, found = await told(bus, NODE.id), await status(bus)
    assert (found.policy, found.schema, found.code_version) == ("serial", 1, __version__)
    assert (node.state, node.devices, node.clock_skew_s) == ("up", ("node/cpu0",), None)
