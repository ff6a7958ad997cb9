"""The example that watches a running pipeline."""

import asyncio
import sys
from pathlib import Path

from bus_samples import WORKER, an_event

from jigsawrl.bus.client import connect
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.events import SubStagesEnded
from jigsawrl.contract.parts import SubStage

EXAMPLE = Path(__file__).parents[2] / "examples" / "watch_events.py"


async def test_the_example_prints_sub_stages_as_text(own_server: EmbeddedServer):
    bus = await connect(own_server.url, name="test")
    await bus.create_streams([bus.subjects.events_stream()])
    process = await asyncio.create_subprocess_exec(
        sys.executable, EXAMPLE, own_server.url, "p", stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(20):
            assert b"watching jig.event.p.>" in await process.stdout.readline()
            await asyncio.sleep(0.3)
            span = SubStage(
                kind="bulk_decode",
                version=3,
                started_s=0.0,
                ended_s=0.25,
                duration_s=0.25,
                num_iterations=8,
                num_tokens=512,
            )
            await bus.publish_event(
                SubStagesEnded(id="s", pipeline="p", worker=WORKER, spans=(span,))
            )
            line = (await process.stdout.readline()).decode()
            assert " ".join(line.split()[1:]) == (
                "p.rollout0 bulk_decode version 3 250.0 ms 512 tokens"
            )
            await bus.publish_event(an_event(1))
            assert "pipeline cancelled" in (await process.stdout.readline()).decode()
    finally:
        process.kill()
        await process.communicate()
        await bus.close()
