"""The trainer tenant over a real nats-server: commands in, weights, files and events out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jigsawrl.bus.base import RecordGoneError
from jigsawrl.bus.client import NatsBus
from jigsawrl.config import (
    CheckpointConfig,
    InitModelConfig,
    PipelineConfig,
    RolloutConfig,
    SamplingConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.config_algorithm import OverlongConfig, RLOOConfig
from jigsawrl.contract.commands import (
    BatchCut,
    Configure,
    PublishWeights,
    TrainedGroup,
    TrainedSequence,
)
from jigsawrl.contract.events import (
    CheckpointCommitted,
    SubStagesEnded,
    VersionPublished,
    WorkerRefused,
)
from jigsawrl.contract.message import Array, Ledger, Ref, Worker
from jigsawrl.contract.records import RewardRecord, SequenceRecord
from services.run import Context, RefusedError
from services.trainer.parallel import leave_gang
from services.trainer.trainer import Trainer

CONFIG = PipelineConfig(
    name="p",
    device="cpu",
    model=InitModelConfig(
        hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16
    ),
    task=SortDigitsConfig(num_held_out=5),
    trainer=TrainerConfig(num_steps=9, checkpoint=CheckpointConfig(every=2)),
)

Start = Callable[..., AbstractAsyncContextManager[Trainer]]


def worker(gang_epoch: int) -> Worker:
    return Worker(id="p.trainer0", boot=f"b{gang_epoch}")


def boot(bus: Any, run_folder: Path, gang_epoch: int) -> Trainer:
    """A trainer's boot, not yet configured."""
    context = Context(
        bus=bus,
        worker=worker(gang_epoch),
        pipeline="p",
        run_folder=str(run_folder),
        device="node0/cpu0",
    )
    return Trainer(context)


def configure_command(gang_epoch: int, config: PipelineConfig = CONFIG) -> Configure:
    """What the scheduler sends to it."""
    return Configure(
        id=f"c{gang_epoch}",
        worker=worker(gang_epoch),
        leader_epoch=1,
        config=encode_config(config),
        incarnation=1,
        gang_epoch=gang_epoch,
    )


@pytest.fixture
def start(bus: NatsBus, tmp_path: Path) -> Start:
    """``start(gang_epoch)``: a configured trainer for the length of a block, at whose end it is told
    to stop, or crashes."""

    @asynccontextmanager
    async def start(
        gang_epoch: int = 1, config: PipelineConfig = CONFIG, *, crash: bool = False
    ) -> AsyncIterator[Trainer]:
        trainer = boot(bus, tmp_path, gang_epoch)
        try:
            await trainer.configure(config, configure_command(gang_epoch, config))
            yield trainer
        finally:
            if crash:  # what a killed process would not do is left out
                await trainer._thread.stop(leave_gang)
            else:
                await trainer.close()

    return start


async def store_group(bus: NatsBus, group: str, rewards: list[float]) -> TrainedGroup:
    """A group of two-token answers whose prompt is never read by the trainer."""
    sequences = []
    for index, reward in enumerate(rewards):
        name = f"{group}/s{index}"
        record = SequenceRecord(
            id=f"finished:{name}",
            pipeline="p",
            group=group,
            sequence=name,
            epoch=1,
            num_prompt_tokens=2,
            tokens=Array.of("int32", [3, 12, 2 + index, 1]),
            logprobs=Array.of("float32", [0.0, 0.0, -2.5, -2.5]),
            versions=Array.of("int32", [-1, -1, 0, 0]),
            loss_mask=Array.of("uint8", [0, 0, 1, 1]),
            finish_reason="stop",
        )
        score = RewardRecord(
            id=f"reward:{name}",
            pipeline="p",
            sequence=name,
            epoch=1,
            reward=reward,
            correct=reward > 0,
            response_text=str(index),
        )
        refs = await bus.store(record), await bus.store(score)
        sequences.append(TrainedSequence(sequence=name, record=refs[0], reward=refs[1]))
    return TrainedGroup(group=group, prompt=Ref("unused", 1), sequences=tuple(sequences))


async def make_cut(bus: NatsBus, version: int, gang_epoch: int = 1, **changes: Any) -> BatchCut:
    groups = [await store_group(bus, f"g{version}-{i}", [1.0, 0.0, 0.0]) for i in range(2)]
    cut = BatchCut(
        id=f"cut{version}",
        worker=worker(gang_epoch),
        leader_epoch=1,
        incarnation=1,
        gang_epoch=gang_epoch,
        version=version,
        groups=tuple(groups),
        ledger=Ledger(cursor=2 * (version + 1)),
        retain_versions=((1, 0),),
        substages={"bulk_decode": (1.5, 0.5)},
        rollout_s=1.0,
    )
    return msgspec.structs.replace(cut, **changes)


def publish_command(version: int, gang_epoch: int = 1) -> PublishWeights:
    return PublishWeights(
        retain_versions=(),
        id=f"publish{version}",
        worker=worker(gang_epoch),
        leader_epoch=1,
        incarnation=1,
        gang_epoch=gang_epoch,
        version=version,
    )


Heard = Callable[[], Awaitable[list[Any]]]


@pytest.fixture
def heard(bus: NatsBus) -> Heard:
    """All events so far."""

    async def read() -> list[Any]:
        count = (await bus.fill(bus.subjects.events_stream().name)).num_messages
        events: list[Any] = []
        async with asyncio.timeout(10):
            async for stored in bus.read_events(0):
                events.append(stored.event)
                if len(events) == count:
                    break
        return events

    return read


def of_kind(events: list[Any], kind: type) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


async def test_a_step_is_published_recorded_and_announced(
    bus: NatsBus, start: Start, heard: Heard, tmp_path: Path
) -> None:
    async with start() as trainer:
        await trainer.handle(publish_command(0))
        await trainer.handle(await make_cut(bus, 0))
        await trainer.handle(await make_cut(bus, 1))
    events = await heard()
    published = of_kind(events, VersionPublished)
    assert [(e.version, e.num_trained_tokens) for e in published] == [(0, 0), (1, 12), (2, 12)]
    assert [e.version for e in of_kind(events, CheckpointCommitted)] == [0, 2]
    payloads = [(await bus.fetch_weights(event.manifest))[1] for event in published]
    assert len({bytes(payload) for payload in payloads}) == 3
    metrics = published[1].metrics
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["staleness_total_max"] == 0.0
    assert metrics["substage_bulk_decode_s"] == 1.5
    assert metrics["tokens_per_s"] == pytest.approx(12 / (1.0 + metrics["train_s"]))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]
    assert len((tmp_path / "trajectories" / "v1.jsonl").read_text().splitlines()) == 6
    kinds = {span.kind for event in of_kind(events, SubStagesEnded) for span in event.spans}
    assert kinds == {"forward_backward", "optimizer", "weight_sync", "checkpoint"}


async def test_rewards_are_shaped_before_they_are_trained_on(
    bus: NatsBus, start: Start, heard: Heard, tmp_path: Path
) -> None:
    config = msgspec.structs.replace(
        CONFIG,
        algorithm=RLOOConfig(overlong=OverlongConfig(buffer_tokens=2, factor=0.5)),
        rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=3)),
    )
    async with start(config=config) as trainer:
        await trainer.handle(await make_cut(bus, 0))
    (published,) = of_kind(await heard(), VersionPublished)
    # Each answer has two tokens, one into the buffer of two.
    assert published.metrics["overlong_penalty_mean"] == pytest.approx(-0.25)
    assert published.metrics["reward_mean"] == pytest.approx(1 / 3 - 0.25)
    lines = (tmp_path / "trajectories" / "v1.jsonl").read_text().splitlines()
    assert {json.loads(line)["reward"] for line in lines} == {0.75, -0.25}


async def test_a_repeated_command_trains_nothing_twice(
    bus: NatsBus, start: Start, heard: Heard, tmp_path: Path
) -> None:
    async with start() as trainer:
        await trainer.handle(publish_command(0))
        cut = await make_cut(bus, 0)
        await trainer.handle(cut)
        await trainer.handle(cut)
        await trainer.handle(publish_command(0))  # an old one, redelivered
        await trainer.handle(await make_cut(bus, 1))
        await trainer.handle(cut)  # repeated by a new leader, after a restart of the server
        await trainer.handle(publish_command(0))
    events = await heard()
    published = of_kind(events, VersionPublished)
    assert [event.version for event in published] == [0, 1, 2]  # the repeats have the same ids
    assert of_kind(events, WorkerRefused) == []
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


async def test_a_new_boot_goes_on_from_the_checkpoint_and_repeats_the_step_exactly(
    bus: NatsBus, start: Start, heard: Heard
) -> None:
    async with start(crash=True) as trainer:
        for version in range(3):
            await trainer.handle(await make_cut(bus, version))
    undisturbed = of_kind(await heard(), VersionPublished)[-1]
    first, _ = await bus.fetch_weights(undisturbed.manifest)
    async with start(gang_epoch=2) as trainer:
        await trainer.handle(publish_command(2, gang_epoch=2))
        await trainer.handle(await make_cut(bus, 2, gang_epoch=2))
    events = await heard()
    assert [(e.version, e.gang_epoch) for e in of_kind(events, CheckpointCommitted)] == [
        (0, 1),
        (2, 1),
        (2, 2),
    ]
    published = {(e.version, e.gang_epoch): e for e in of_kind(events, VersionPublished)}
    assert published.keys() == {(1, 1), (2, 1), (3, 1), (2, 2), (3, 2)}
    assert published[3, 1].metrics["loss"] == published[3, 2].metrics["loss"]
    told = [
        (published[2, epoch].num_trained_tokens, published[2, epoch].metrics) for epoch in (1, 2)
    ]
    assert told[0] == told[1]  # the first boot might have died before it announced
    assert told[0][0] == 12
    second, _ = await bus.fetch_weights(published[3, 2].manifest)
    assert first.sha256 == second.sha256


async def test_a_step_is_on_record_before_its_checkpoint_can_be_restored(
    bus: NatsBus, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise SystemError("dies while it announces")

    async with start(crash=True) as trainer:
        await trainer.handle(await make_cut(bus, 0))
        monkeypatch.setattr(trainer, "_announce_checkpoint", crash)
        with pytest.raises(SystemError):
            await trainer.handle(await make_cut(bus, 1))  # version 2 is checkpointed
    monkeypatch.undo()
    async with start(gang_epoch=2) as trainer:
        await trainer.handle(publish_command(2, gang_epoch=2))
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["version"] for line in lines] == [1, 2]


async def test_a_trainer_that_is_told_to_stop_leaves_a_checkpoint_of_its_version(
    bus: NatsBus, start: Start, tmp_path: Path
) -> None:
    async with start() as trainer:
        for version in range(3):
            await trainer.handle(await make_cut(bus, version))
        assert not (tmp_path / "checkpoints" / "v3-e1").exists()  # every second is due
    assert (tmp_path / "checkpoints" / "v3-e1" / "COMMITTED").exists()


async def test_a_run_folder_of_another_pipeline_is_refused(start: Start, tmp_path: Path) -> None:
    async with start():
        pass
    other = msgspec.structs.replace(CONFIG, name="q")
    with pytest.raises(RefusedError, match="holds checkpoints of pipeline p: give q a run folder"):
        async with start(2, other):
            pass


async def test_a_full_weight_channel_makes_room_before_it_is_written(
    bus: NatsBus, start: Start, heard: Heard
) -> None:
    spec = bus.subjects.weights_stream("p")
    async with start() as trainer:
        await trainer.handle(publish_command(0))
        one = (await bus.fill(spec.name)).num_messages
        num_bytes = of_kind(await heard(), VersionPublished)[0].num_bytes
        small = msgspec.structs.replace(spec, max_bytes=int(3.5 * num_bytes) + 40_000)
        await bus.create_streams([small])
        for version in range(4):
            await trainer.handle(await make_cut(bus, version, retain_versions=()))
        assert (await bus.fill(spec.name)).num_messages == 2 * one


async def test_only_the_newest_and_the_retained_weights_stay(
    bus: NatsBus, start: Start, heard: Heard
) -> None:
    async with start() as trainer:
        await trainer.handle(publish_command(0))
        for version in range(4):
            await trainer.handle(await make_cut(bus, version, retain_versions=((1, 1),)))
    present = []
    for event in of_kind(await heard(), VersionPublished):
        try:
            await bus.fetch_weights(event.manifest)
        except RecordGoneError:
            continue
        present.append(event.version)
    assert present == [1, 3, 4]


@pytest.mark.parametrize(
    ("rewards", "reason"), [([float("nan"), 0.0], "loss nan"), (None, "no longer stored")]
)
async def test_what_can_not_be_trained_is_refused_with_its_groups(
    bus: NatsBus,
    start: Start,
    heard: Heard,
    rewards: list[float] | None,
    reason: str,
    tmp_path: Path,
) -> None:
    cut = await make_cut(bus, 0)
    if rewards is None:
        await bus.purge(
            bus.subjects.data_stream("p").name, subject=f"{bus.subjects.prefix}.data.p.>"
        )
    else:
        group = await store_group(bus, "bad", rewards)
        cut = msgspec.structs.replace(cut, groups=(*cut.groups, group))
    async with start() as trainer:
        await trainer.handle(cut)
        events = await heard()
    (refused,) = of_kind(events, WorkerRefused)
    assert "g0-0, g0-1" in refused.reason
    assert "\n" not in refused.reason
    assert not of_kind(events, VersionPublished)
    assert reason in refused.reason
    if rewards is not None:
        assert len((tmp_path / "trajectories" / "refused-v1.jsonl").read_text().splitlines()) == 8


async def test_a_configuration_that_can_not_work_is_refused_in_one_line(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(RefusedError) as caught:
        async with start():
            pass
    assert "\n" not in str(caught.value)
    assert "checkpoints" in str(caught.value)
