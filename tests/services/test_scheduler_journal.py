"""What a leader keeps, and what it does where that can't be kept."""

import asyncio
from pathlib import Path

from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.events import Heartbeat
from services.scheduler.segments import read_segments
from tests.services.scheduler_steps import NODE, Start, status, until_true


async def test_a_disk_that_takes_nothing_ends_no_leader_and_nothing_is_purged(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    for folder in ("events", "snapshots"):
        (tmp_path / folder).write_text("no folder")
    async with leading() as task:
        for i in range(160):
            await bus.publish_event(Heartbeat(id=f"h{i}", node=NODE))

        async def two() -> bool:
            return len(await bus.load_snapshots()) == 2

        await until_true(two)
        await asyncio.sleep(0.5)
        stored = await bus.fill(bus.subjects.events_stream().name)
        assert stored.num_messages == stored.last_sequence
        assert (await status(bus)).stream_sequence >= 160
        assert not task.done()
        for folder in ("events", "snapshots"):
            (tmp_path / folder).unlink()
    sequences = [entry.sequence for entry in read_segments(tmp_path / "events")]
    assert sequences == list(range(1, sequences[-1] + 1))
    assert len(sequences) >= 160
