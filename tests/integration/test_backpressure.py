"""A full stream slows a run and loses nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import nats.js.errors
import pytest

from tests.integration.live_run import LiveRun, conserved

pytestmark = pytest.mark.slow

NUM_STEPS = 12
FILLER = "jig.data.tiny.filler"


async def test_a_run_waits_for_room_says_so_and_goes_on(tmp_path: Path) -> None:
    with LiveRun(
        tmp_path, f"trainer.num_steps={NUM_STEPS}", "trainer.checkpoint.every=100"
    ) as live:
        await asyncio.to_thread(live.until, lambda: live.num_steps_done() >= 2)
        client = await nats.connect(live.url())
        stream = client.jetstream()
        chunk = 1024 * 1024
        while chunk >= 64:  # to the last record that would fit
            try:
                await stream.publish(FILLER, b"x" * chunk)
            except nats.js.errors.APIError:
                chunk //= 2
        num_steps_done = live.num_steps_done()
        await asyncio.to_thread(live.until, lambda: "room in JIG_DATA_tiny" in live.stdout)
        assert live.num_steps_done() <= num_steps_done + 1  # what was stored before is trained
        await stream.purge_stream("JIG_DATA_tiny", subject=FILLER)
        await client.close()
        assert await asyncio.to_thread(live.wait) == 0, live.story()
        assert live.tiny()["version"] == NUM_STEPS
        assert conserved(live.tiny()["groups"])
        assert live.tiny()["groups"]["failed"] == 0
