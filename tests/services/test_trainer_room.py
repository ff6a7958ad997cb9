"""A trainer whose weight channel has no room waits, says so, and goes on when there is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.events import VersionPublished, WorkerRefused
from jigsawrl.contract.requests import Activity
from tests.services.test_trainer import CONFIG, boot, configure_command, make_cut, publish_command

pytestmark = pytest.mark.slow

FULL_S = 33.0
"""A trainer that gave up would have done so after 30 s."""


async def waits_for_room(bus: NatsBus) -> Activity:
    """The first report of such a wait."""
    async for activity in bus.watch_activities("p"):
        if "room" in activity.activity:
            return activity
    raise AssertionError("nothing is watched any more")


async def test_a_weight_channel_that_stays_full_is_waited_for(bus: NatsBus, tmp_path: Path) -> None:
    spec = bus.subjects.weights_stream("p")
    pinned = f"{bus.subjects.weights_of_version('p', 1, 7)}.filler"
    trainer = boot(bus, tmp_path, 1)
    try:
        await trainer.configure(CONFIG, configure_command(1))
        await trainer.handle(publish_command(0))
        num_bytes = (await bus.fill(spec.name)).num_bytes
        link = await bus.connection.ready()
        await link.js.publish(pinned, bytes(num_bytes))
        full = msgspec.structs.replace(spec, max_bytes=2 * num_bytes + 10_000)
        await bus.create_streams([full])
        said = asyncio.create_task(waits_for_room(bus))
        cut = await make_cut(bus, 0, retain_versions=((1, 0), (1, 7)))
        step = asyncio.create_task(trainer.handle(cut))
        activity = await asyncio.wait_for(said, 20)
        assert "version 1 needs" in activity.detail
        assert activity.num_total == CONFIG.trainer.num_steps  # the plain view shows no other
        await asyncio.sleep(FULL_S)
        assert not step.done()
        await bus.purge(spec.name, subject=pinned)
        await asyncio.wait_for(step, 20)
    finally:
        await trainer.close()
    told = await events(bus)
    assert [e.version for e in told if isinstance(e, VersionPublished)] == [0, 1]
    assert not [e for e in told if isinstance(e, WorkerRefused)]


async def events(bus: NatsBus) -> list[Any]:
    """All so far."""
    count = (await bus.fill(bus.subjects.events_stream().name)).num_messages
    found: list[Any] = []
    async for stored in bus.read_events(0):
        found.append(stored.event)
        if len(found) == count:
            break
    return found
