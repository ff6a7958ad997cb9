"""The scheduler service over a real nats-server: leading, failing over, asking, archiving."""

import asyncio
import contextlib
import signal
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import nats.js.errors
import pytest

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.config import (
    EvaluationConfig,
    InitModelConfig,
    PipelineConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.codec import encode
from jigsawrl.contract.commands import Configure, StartTenant
from jigsawrl.contract.events import (
    Heartbeat,
    LeaderElected,
    NodeStarted,
    Tick,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from jigsawrl.contract.requests import Cancel, Status, StatusQuery, Submit
from jigsawrl.contract.spec import Device
from services.scheduler.leader import DeposedError, Leader
from services.scheduler.replay import replay
from services.scheduler.segments import read_segments
from services.scheduler.snapshots import newest, sequences_on_disk

NODE = Worker(id="node", boot="n1")

Start = Callable[[], AbstractAsyncContextManager["asyncio.Future[None]"]]


@pytest.fixture
def leading(bus: NatsBus, tmp_path: Path) -> Start:
    """Run a leader for the length of a block."""

    @asynccontextmanager
    async def start() -> AsyncIterator["asyncio.Future[None]"]:
        leader = Leader(bus, holder=uuid.uuid4().hex[:6], folder=tmp_path, snapshot_events=50)
        task = asyncio.ensure_future(leader.lead())
        try:
            yield task
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, DeposedError):
                await task

    return start


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


async def test_a_full_stream_is_what_its_pipeline_waits_for(bus: NatsBus, leading: Start) -> None:
    async with leading():
        await submit(bus, config())
        stream = bus.subjects.data_stream("p").name
        largest = (await bus.fill(stream)).max_bytes
        link = await bus.connection.ready()
        subject = f"{bus.subjects.prefix}.data.p.filler"
        chunk = b"x" * min(largest // 4, 4 * 1024**2)
        with contextlib.suppress(nats.js.errors.APIError):
            while True:
                await link.js.publish(subject, chunk)
        while (await bus.fill(stream)).num_bytes < 0.96 * largest:
            await link.js.publish(subject, b"x" * (largest // 100))
        await asyncio.sleep(1.1)  # streams are looked at once a second
        told = (await status(bus)).pipelines[0].waiting_for
        assert any(f"room in {stream}" in one for one in told), told


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


def config(name: str = "p") -> PipelineConfig:
    return PipelineConfig(
        name=name,
        model=InitModelConfig(max_position_embeddings=64),
        task=SortDigitsConfig(),
        trainer=TrainerConfig(num_steps=2, groups_per_batch=2),
        evaluation=EvaluationConfig(enabled=False),
    )


async def submit(bus: NatsBus, wanted: PipelineConfig, *, request: str = "r1") -> str | None:
    message = Submit(id=request, config=encode_config(wanted))
    return (await bus.request("scheduler", message, timeout_s=10)).error


async def status(bus: NatsBus) -> Status:
    return await bus.request("scheduler", StatusQuery(id=uuid.uuid4().hex), timeout_s=10)


@asynccontextmanager
async def collecting(bus: NatsBus, worker: Worker) -> AsyncIterator[list[Any]]:
    """Commands of one boot, as they come."""
    commands: list[Any] = []

    async def handle(command: Any) -> None:
        commands.append(command)

    await bus.bind_commands(worker)
    task = asyncio.ensure_future(bus.consume_commands(worker, handle))
    yield commands
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], Any]) -> None:
    async def holds() -> bool:
        return bool(condition())

    await until_true(holds)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def start_node(bus: NatsBus) -> None:
    devices = (Device("node", 0, "cpu", 1 << 30),)
    await bus.publish_event(NodeStarted(id="node", node=NODE, devices=devices))


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


async def test_a_repeated_submission_is_accepted_and_a_second_one_refused(
    bus: NatsBus, leading: Start
) -> None:
    async with leading():
        assert await submit(bus, config()) is None
        assert await submit(bus, config()) is None
        error = await submit(bus, config(), request="r2")
        assert error is not None
        assert "already queued" in error
        cancel = Cancel(id="c", pipeline="p", reason="enough")
        assert (await bus.request("scheduler", cancel, timeout_s=10)).error is None
        assert (await status(bus)).pipelines[0].failure == "cancelled: enough"
        assert await submit(bus, config(), request="r3") is None


async def test_a_store_without_room_and_a_bad_config_are_answered_with_the_reason(
    bus: NatsBus, leading: Start
) -> None:
    huge = msgspec.structs.replace(
        config("huge"), trainer=TrainerConfig(num_steps=1, groups_per_batch=1 << 40)
    )
    async with leading():
        error = await submit(bus, huge)
        assert error is not None
        assert "pipeline huge needs" in error
        reply = await bus.request("scheduler", Submit(id="x", config=b"\xc1"), timeout_s=10)
        assert "can't be read" in reply.error


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


async def until_leads(bus: NatsBus, *, after: int) -> None:
    async def leads() -> bool:
        return (await status(bus)).leader_epoch > after

    await until_true(leads)


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


@asynccontextmanager
async def process(url: str, prefix: str, folder: Path) -> AsyncIterator[Process]:
    """A scheduler as users start it."""
    arguments = ("--url", url, "--state-dir", str(folder), "--prefix", prefix)
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", *arguments
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


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
