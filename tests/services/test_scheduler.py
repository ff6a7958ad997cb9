"""The scheduler service over a real nats-server: leading, failing over, asking, archiving."""

import asyncio
import contextlib
import signal
from pathlib import Path

import msgspec
import pytest

from jigsawrl import __version__
from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.codec import encode
from jigsawrl.contract.commands import Configure, StartTenant
from jigsawrl.contract.events import (
    Heartbeat,
    LeaderElected,
    Tick,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from jigsawrl.core.scheduler import Scheduler
from services.scheduler.leader import DeposedError, Leader
from services.scheduler.replay import replay
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import Snapshot, encode_snapshot, newest, sequences_on_disk
from tests.services.scheduler_steps import (
    NODE,
    Start,
    collecting,
    config,
    process,
    start_node,
    status,
    submit,
    until,
    until_leads,
    until_true,
)


async def test_one_process_may_lead_twice_within_the_duplicate_window(
    bus: NatsBus, tmp_path: Path
) -> None:
    elections = []
    for _ in range(2):  # the second after a snapshot, which ends behind the first election
        leader = Leader(bus, holder="one-process", folder=tmp_path, snapshot_events=5)
        task = asyncio.ensure_future(leader.lead())
        elections.append((await status(bus)).leader_epoch)
        await asyncio.sleep(0.5)
        before = (await status(bus)).stream_sequence
        await asyncio.sleep(1.5)
        assert (await status(bus)).stream_sequence > before, "ticks arrive"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    assert elections[1] > elections[0]


async def test_ticks_come_whatever_other_events_do(bus: NatsBus, leading: Start) -> None:
    async with leading():
        await submit(bus, config())
        start = (await status(bus)).stream_sequence
        ticks = 0
        for number in range(60):  # each marks the pipeline and, 15 ms later, brings a decision
            worker = Worker(id=f"p.rollout{number}", boot="b")
            await bus.publish_event(
                WorkerStarted(
                    id=f"s{number}",
                    pipeline="p",
                    worker=worker,
                    role="rollout",
                    node=None,
                    device=None,
                )
            )
            await asyncio.sleep(0.012)
        async with asyncio.timeout(5):
            async for stored in bus.read_events(start):
                ticks += isinstance(stored.event, Tick)
                if isinstance(stored.event, WorkerStarted) and stored.event.id == "s59":
                    break
        assert ticks >= 5


async def test_a_submitted_pipeline_is_started_on_the_node(bus: NatsBus, leading: Start) -> None:
    async with leading(), collecting(bus, NODE) as commands:
        await start_node(bus)
        assert await submit(bus, config()) is None
        await until(lambda: len(commands) >= 4)
        assert {c.tenant for c in commands if isinstance(c, StartTenant)} == {
            "p.environment0",
            "p.reward0",
            "p.trainer0",
            "p.rollout0",
        }
        found = (await status(bus)).pipelines[0]
        assert (found.pipeline, found.state) == ("p", "starting")
        assert "p.trainer0 to start" in found.waiting_for


async def test_a_successor_repeats_commands_under_their_ids_and_rises_in_epoch(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    trainer = Worker(id="p.trainer0", boot="b1")
    started = WorkerStarted(
        id="started", pipeline="p", worker=trainer, role="trainer", node="node", device=None
    )
    async with collecting(bus, NODE) as orders, collecting(bus, trainer) as commands:
        async with leading():
            await start_node(bus)
            await submit(bus, config())
            await until(lambda: len(orders) >= 4)
            first_epoch = (await status(bus)).leader_epoch
        async with leading():
            await until_leads(bus, after=first_epoch)
            await bus.publish_event(started)
            await until(lambda: commands)
            assert isinstance(commands[0], Configure)
            assert commands[0].leader_epoch > first_epoch
            found = await status(bus)
            assert found.pipelines[0].state == "starting"
    assert len({c.id for c in orders}) == len(orders) == 4  # The server dropped the repeats.
    replayed = {c.id: encode(c) for c in replay(tmp_path)}
    assert [replayed[c.id] for c in [*orders, *commands]] == [
        encode(c) for c in [*orders, *commands]
    ]


async def test_a_leader_that_reads_anothers_election_stops(bus: NatsBus, leading: Start) -> None:
    async with leading() as task:
        await status(bus)
        await bus.publish_event(LeaderElected(id="other", leader="other", code_version="1"))
        async with asyncio.timeout(10):
            with pytest.raises(DeposedError):
                await task


async def test_a_killed_scheduler_process_is_followed_by_the_standby(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> None:
    async with process(nats_server.url, prefix, tmp_path / "a") as first:
        leader = (await status(bus)).leader
        async with process(nats_server.url, prefix, tmp_path / "b") as second:
            assert await submit(bus, config()) is None
            first.send_signal(signal.SIGKILL)

            async def followed() -> bool:
                return (await status(bus)).leader != leader

            await until_true(followed)
            assert [p.pipeline for p in (await status(bus)).pipelines] == ["p"]
            second.send_signal(signal.SIGTERM)
            assert await second.wait() == 0
    assert list(replay(tmp_path / "b")) == []


async def test_snapshots_let_the_stream_be_purged_and_a_restart_goes_on(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    async with leading():
        await submit(bus, config())
        for i in range(160):
            await bus.publish_event(Heartbeat(id=f"h{i}", node=NODE))
        events = bus.subjects.events_stream().name

        async def purged() -> bool:
            return (await bus.fill(events)).num_messages <= 130

        await until_true(purged)
        first_epoch = (await status(bus)).leader_epoch
    assert len(await bus.load_snapshots()) == 2
    async with leading():
        await until_leads(bus, after=first_epoch)
        assert (await status(bus)).pipelines[0].pipeline == "p"
    sequences = [entry.sequence for entry in read_segments(tmp_path / "events")]
    assert sequences == list(range(1, sequences[-1] + 1))
    assert list(replay(tmp_path)) == []


async def test_a_replay_from_any_snapshot_gives_the_same_commands(
    bus: NatsBus, leading: Start, tmp_path: Path
) -> None:
    trainer = Worker(id="p.trainer0", boot="b1")
    async with collecting(bus, NODE) as orders, leading():
        await start_node(bus)
        for i in range(60):
            await bus.publish_event(Heartbeat(id=f"h{i}", node=NODE))
        await submit(bus, config())
        await until(lambda: len(orders) >= 4)
        for i in range(60, 120):
            await bus.publish_event(Heartbeat(id=f"h{i}", node=NODE))
        await bus.publish_event(
            WorkerStarted(
                id="s", pipeline="p", worker=trainer, role="trainer", node="node", device=None
            )
        )
        await until(lambda: len(sequences_on_disk(tmp_path / "snapshots")) >= 3)
        await asyncio.sleep(0.5)  # another decision
    whole = [encode(command) for command in replay(tmp_path)]
    assert len(whole) >= 5
    for after in sequences_on_disk(tmp_path / "snapshots")[:-1]:
        part = [encode(command) for command in replay(tmp_path, after=after)]
        assert part == whole[len(whole) - len(part) :]


async def test_a_killed_leader_leaves_its_version_and_a_stopped_one_hands_over(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> None:
    async with process(nats_server.url, prefix, tmp_path) as killed:
        await status(bus)
        killed.send_signal(signal.SIGKILL)
        await killed.wait()
    with pytest.raises(BusError, match="led last and did not stop in order"):
        newest(await bus.load_snapshots(), code_version="9")
    async with process(nats_server.url, prefix, tmp_path) as stopped:
        await until_leads(bus, after=1)
        stopped.send_signal(signal.SIGTERM)
        assert await stopped.wait() == 0
    found = newest(await bus.load_snapshots(), code_version="9")
    assert found is not None
    assert found.handed_over


async def test_a_leader_that_thaws_behind_a_purge_is_deposed(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> None:
    async with process(nats_server.url, prefix, tmp_path / "a") as frozen:
        first = await status(bus)
        async with process(nats_server.url, prefix, tmp_path / "b"):
            frozen.send_signal(signal.SIGSTOP)
            await until_leads(bus, after=first.leader_epoch)
            stream = bus.subjects.events_stream().name
            await bus.purge(stream, before=(await status(bus)).stream_sequence)
            frozen.send_signal(signal.SIGCONT)
            await asyncio.sleep(2)
            assert frozen.returncode is None
            now = await status(bus)
            assert now.leader != first.leader
            assert now.leader_epoch > first.leader_epoch


async def test_an_election_behind_a_snapshot_that_hands_over_binds_to_its_version(
    bus: NatsBus, tmp_path: Path
) -> None:
    handed = Snapshot(
        sequence=0, code_version="0.0.9", state=Scheduler().snapshot(), handed_over=True
    )
    await bus.save_snapshot(encode_snapshot(handed))
    elected = LeaderElected(id="other", leader="other", code_version="0.0.9")
    await bus.publish_event(elected)
    leader = Leader(bus, holder="this", folder=tmp_path)
    with pytest.raises(BusError, match=r"start 0\.0\.9 once more"):
        await leader.lead()
    stored = await bus.fill(bus.subjects.events_stream().name)
    assert stored.last_sequence == 1, "it was not elected, which would bind 0.0.9 in turn"


async def test_a_state_that_this_version_does_not_know_is_refused_in_one_line(
    bus: NatsBus, tmp_path: Path
) -> None:
    state = msgspec.msgpack.encode({"clock": 1})
    snapshot = Snapshot(sequence=0, code_version=__version__, state=state)
    await bus.save_snapshot(encode_snapshot(snapshot))
    with pytest.raises(BusError, match="state can't be read by this version"):
        await Leader(bus, holder="this", folder=tmp_path).lead()


async def test_a_deleted_event_stream_is_noticed_before_anything_is_published(
    bus: NatsBus, tmp_path: Path
) -> None:
    snapshot = Snapshot(sequence=7, code_version=__version__, state=Scheduler().snapshot())
    await bus.save_snapshot(encode_snapshot(snapshot))
    with pytest.raises(BusError, match="the event stream ends at 0, but"):
        await Leader(bus, holder="this", folder=tmp_path).lead()
    assert (await bus.fill(bus.subjects.events_stream().name)).last_sequence == 0
