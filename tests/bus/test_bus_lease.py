"""The leader lease."""

import asyncio
import os
import signal
import time

from jigsawrl.bus.lease import LEASE_TTL_S
from tests.freezing import freeze


async def test_a_lease_has_one_holder(bus):
    revision = await bus.acquire_lease("leader", "a")
    assert revision is not None
    assert await bus.acquire_lease("leader", "b") is None


async def test_a_lease_that_is_not_renewed_is_taken_over_after_its_term(bus):
    first = await bus.acquire_lease("leader", "a")
    started_s = time.monotonic()
    second = None
    while second is None:
        await asyncio.sleep(0.2)
        second = await bus.acquire_lease("leader", "b")
    assert LEASE_TTL_S - 0.5 < time.monotonic() - started_s < LEASE_TTL_S + 3
    assert await bus.renew_lease("leader", "a", first) is None
    assert await bus.renew_lease("leader", "b", second) is not None


async def test_a_renewed_lease_outlives_its_first_term(bus):
    revision = await bus.acquire_lease("leader", "a")
    for _ in range(4):
        await asyncio.sleep(1.5)
        revision = await bus.renew_lease("leader", "a", revision)
        assert revision is not None
    assert await bus.acquire_lease("leader", "b") is None


async def test_a_released_lease_is_free_at_once(bus):
    revision = await bus.acquire_lease("leader", "a")
    revision = await bus.renew_lease("leader", "a", revision)
    await bus.release_lease("leader", revision)
    assert await bus.acquire_lease("leader", "b") is not None
    await bus.release_lease("leader", revision)
    assert await bus.acquire_lease("leader", "c") is None


async def test_a_holder_whose_answer_was_lost_still_holds(bus):
    first = await bus.acquire_lease("leader", "a")
    assert await bus.acquire_lease("leader", "a") == first
    second = await bus.renew_lease("leader", "a", first)
    assert await bus.renew_lease("leader", "a", first) == second


async def test_a_lease_that_can_not_be_renewed_within_its_term_is_lost(own_server, own_bus):
    revision = await own_bus.acquire_lease("leader", "a")
    freeze(own_server.pid)
    started_s = time.monotonic()
    try:
        renewed = await asyncio.wait_for(own_bus.renew_lease("leader", "a", revision), 12)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)
    assert renewed is None
    assert time.monotonic() - started_s <= LEASE_TTL_S + 1
