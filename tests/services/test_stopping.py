"""A service that is told to stop is gone in time, whatever hangs in it."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

PROGRAM = """
import asyncio, time
from services.stopping import until_told_to_stop

async def stubborn():
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            print("swallowed", flush=True)

async def stuck_in_native_code():
    try:
        await asyncio.sleep(60)
    finally:
        time.sleep(60)

async def orderly():
    await asyncio.sleep(60)

async def main():
    print("ready", flush=True)
    await until_told_to_stop({life}(), deadline_s=0.5)

asyncio.run(main())
"""


async def stopped(life: str, number: signal.Signals) -> tuple[int, str]:
    """The exit status and what it wrote to standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM.format(life=life)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(20):
        assert await process.stdout.readline() == b"ready\n"
        await asyncio.sleep(0.1)
        process.send_signal(number)
        errors = await process.stderr.read()
        return await process.wait(), errors.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_an_orderly_life_ends_with_status_0(number: signal.Signals) -> None:
    assert await stopped("orderly", number) == (0, "")


@pytest.mark.parametrize("life", ["stubborn", "stuck_in_native_code"])
async def test_one_that_hangs_is_ended_at_the_deadline_and_shows_where(life: str) -> None:
    status, errors = await stopped(life, signal.SIGTERM)
    assert status == 1
    assert "Timeout (0:00:00.500000)!" in errors
    assert "most recent call first" in errors
