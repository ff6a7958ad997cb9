"""What the scheduler service answers, over a real nats-server."""

import asyncio
import contextlib
import signal
from pathlib import Path

import msgspec
import nats.js.errors
import pytest

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.config import InitModelConfig, PipelineConfig, TrainerConfig
from jigsawrl.contract.requests import Cancel, StatusQuery, Submit
from services.scheduler.sizing import MAX_STATE_BYTES, state_bytes
from tests.services.scheduler_steps import (
    Start,
    config,
    process,
    status,
    submit,
    until_leads,
)


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
        config("huge"),
        model=InitModelConfig(max_position_embeddings=400_000),
        trainer=TrainerConfig(num_steps=1, groups_per_batch=500),
    )
    async with leading():
        error = await submit(bus, huge)
        assert error is not None
        assert "pipeline huge needs" in error
        assert "the store has no room" in error
        reply = await bus.request("scheduler", Submit(id="x", config=b"\xc1"), timeout_s=10)
        assert "can't be read" in reply.error


async def test_a_pipeline_of_which_no_event_could_tell_is_refused(
    bus: NatsBus, leading: Start
) -> None:
    async with leading():
        for size, expected in ((2**20, "spec.memory.trainer"), (2**30, "can't serialize")):
            wide = InitModelConfig(hidden_size=size, intermediate_size=size, num_layers=256)
            error = await submit(bus, msgspec.structs.replace(config("wide"), model=wide))
            assert error is not None
            assert "pipeline wide can't be told to the cluster" in error
            assert expected in error
        assert not (await status(bus)).pipelines
        assert not (await status(bus)).num_dead_letters
        seed = msgspec.structs.replace(config("q"), seed=2**63 - 1)
        assert await submit(bus, seed, request="r2") is None


async def test_a_leader_that_thaws_does_not_act_on_requests_that_came_while_it_was_frozen(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> None:
    async with process(nats_server.url, prefix, tmp_path / "a") as frozen:
        first = await status(bus)
        async with process(nats_server.url, prefix, tmp_path / "b"):
            assert await submit(bus, config()) is None
            cancel = Cancel(id="c", pipeline="p", reason="enough")
            assert (await bus.request("scheduler", cancel, timeout_s=10)).error is None
            frozen.send_signal(signal.SIGSTOP)
            await until_leads(bus, after=first.leader_epoch)
            assert await submit(bus, config(), request="r2") is None  # "a" has it waiting, too
            link = await bus.connection.ready()
            await link.js.publish(f"{prefix}.data.p.filler", b"x")
            await asyncio.sleep(1)
            frozen.send_signal(signal.SIGCONT)
            await asyncio.sleep(3)
            stream = bus.subjects.data_stream("p").name
            assert (await bus.fill(stream)).num_messages == 1, "the living pipeline's records"
            assert (await status(bus)).pipelines[0].state == "queued"


async def test_a_repeated_request_means_what_it_meant_the_first_time(
    bus: NatsBus, leading: Start
) -> None:
    cancel = Cancel(id="c", pipeline="p", reason="enough")
    async with leading():
        assert await submit(bus, config()) is None
        assert (await bus.request("scheduler", cancel, timeout_s=10)).error is None
        assert await submit(bus, config()) is None
        assert (await status(bus)).pipelines[0].state == "failed"
        assert await submit(bus, config(), request="r2") is None
        assert (await bus.request("scheduler", cancel, timeout_s=10)).error is None
        assert (await status(bus)).pipelines[0].state == "queued"
    async with leading():  # a successor knows it, too
        assert await submit(bus, config(), request="r2") is None


async def test_a_pipeline_that_no_snapshot_could_hold_is_refused(
    bus: NatsBus, leading: Start
) -> None:
    def sized(name: str, groups_per_batch: int) -> PipelineConfig:
        trainer = TrainerConfig(num_steps=1, groups_per_batch=groups_per_batch)
        return msgspec.structs.replace(config(name), trainer=trainer)

    per_group = state_bytes(sized("p", 1))
    async with leading():
        error = await submit(bus, sized("a", MAX_STATE_BYTES // per_group + 1))
        assert error is not None
        assert "bytes of the scheduler's snapshots" in error
        assert await submit(bus, sized("b", MAX_STATE_BYTES // per_group // 2)) is None
        error = await submit(bus, sized("c", MAX_STATE_BYTES // per_group // 2 + 2), request="r2")
        assert error is not None
        assert "for other pipelines: lower trainer.groups_per_batch" in error


async def test_a_snapshot_that_can_not_be_stored_is_told(bus: NatsBus, leading: Start) -> None:
    spec = msgspec.structs.replace(bus.subjects.snapshots_stream(), max_bytes=64)
    await bus.create_streams([spec])
    async with leading():
        assert await submit(bus, config()) is None
        told = (await status(bus)).pipelines[0].waiting_for
        assert any("snapshot of the scheduler, the last of which failed" in one for one in told)


async def test_who_may_only_look_is_told_the_status_and_can_change_nothing(
    bus: NatsBus, leading: Start
) -> None:
    async with leading():
        assert await submit(bus, config()) is None
        told = await bus.request("status", StatusQuery(id="q"), timeout_s=10)
        assert [pipeline.pipeline for pipeline in told.pipelines] == ["p"]
        cancel = Cancel(id="c", pipeline="p", reason="not yours")
        with pytest.raises(BusError, match="cancel is for the target scheduler"):
            await bus.request("status", cancel, timeout_s=10)
        assert (await status(bus)).pipelines[0].failure is None
