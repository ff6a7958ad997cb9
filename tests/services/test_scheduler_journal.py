"""What a leader keeps, and what it does where that can't be kept."""

import asyncio
from pathlib import Path

import msgspec
import nats.js.errors

from jigsawrl import __version__
from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.events import Heartbeat
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import Snapshot, encode_snapshot
from tests.services.scheduler_steps import NODE, Start, config, status, submit, until_true


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


async def fill_events(bus: NatsBus) -> None:
    """To the last byte, with messages that nobody can read."""
    link = await bus.connection.ready()
    num_bytes = 32 * 1024
    while num_bytes >= 32:
        try:
            await link.js.publish(f"{bus.subjects.prefix}.event.p.filler", b"x" * num_bytes)
        except nats.js.errors.APIError:
            num_bytes //= 2


async def shrink_events(bus: NatsBus) -> None:
    spec = msgspec.structs.replace(bus.subjects.events_stream(), max_bytes=256 * 1024)
    await bus.create_streams([spec])


async def until_led_on(bus: NatsBus, *, within_s: float = 20) -> None:
    """Ticks are stored and folded."""
    async with asyncio.timeout(within_s):
        first = (await status(bus)).stream_sequence
        while (await status(bus)).stream_sequence <= first + 2:
            await asyncio.sleep(0.05)


async def test_an_event_stream_that_filled_up_gets_room_and_goes_on(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    await shrink_events(bus)
    async with leading():
        assert await submit(bus, config()) is None
        await fill_events(bus)
        await until_led_on(bus)
        assert (await status(bus)).pipelines[0].pipeline == "p"
    sequences = [entry.sequence for entry in read_segments(tmp_path / "events")]
    assert sequences == list(range(1, sequences[-1] + 1)), "archived before they were purged"


async def test_a_new_leader_finds_room_for_its_election_behind_the_newest_snapshot(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    await shrink_events(bus)
    await fill_events(bus)
    last = (await bus.fill(bus.subjects.events_stream().name)).last_sequence
    scheduler = Scheduler()
    scheduler.state.sequence = last
    state = scheduler.snapshot()
    snapshot = Snapshot(sequence=last, code_version=__version__, state=state)
    await bus.save_snapshot(encode_snapshot(snapshot))
    async with leading():
        await until_led_on(bus)
    sequences = [entry.sequence for entry in read_segments(tmp_path / "events")]
    assert sequences == list(range(1, sequences[-1] + 1)), "archived before they were purged"


async def test_a_new_leader_makes_room_where_no_snapshot_does(bus: NatsBus, leading: Start) -> None:
    await shrink_events(bus)
    await fill_events(bus)
    async with leading():
        await until_led_on(bus)
