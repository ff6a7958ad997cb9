"""The reward service's handlers, on a real bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.config import (
    InitModelConfig,
    PipelineConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.commands import Configure, ScoreOrder, ScoreSequences
from jigsawrl.contract.events import SequencesRewarded, SubStagesEnded
from jigsawrl.contract.message import Array, Ref, Worker
from jigsawrl.contract.records import GroupRecord, RewardRecord, SequenceRecord
from jigsawrl.contract.requests import Answer, HeldOutQuery, ScoreQuery, Scores
from jigsawrl.models.tokenizer import build_tokenizer, encode
from services.reward.reward import Reward
from services.run import Context

WORKER = Worker(id="p.reward0", boot="b1")
TOKENIZER = build_tokenizer("0123456789=")
CONFIG = PipelineConfig(
    name="p",
    model=InitModelConfig(),
    task=SortDigitsConfig(num_held_out=5),
    trainer=TrainerConfig(num_steps=1),
)


@pytest.fixture
async def reward(bus: NatsBus) -> AsyncIterator[Reward]:
    reward = Reward(Context(bus=bus, worker=WORKER, pipeline="p", run_folder=None, device=None))
    command = Configure(
        id="c:0",
        worker=WORKER,
        leader_epoch=1,
        config=encode_config(CONFIG),
        incarnation=0,
        gang_epoch=0,
    )
    await reward.configure(CONFIG, command)
    yield reward
    await reward.close()


async def a_group(bus: NatsBus) -> Ref:
    return await bus.store(
        GroupRecord(
            id="group_record:p/g0:1",
            pipeline="p",
            group="p/g0",
            epoch=1,
            cursor=0,
            prompt_tokens=Array.of("int32", encode(TOKENIZER, "312=")),
            prompt_text="312=",
            problem={"answer": "123"},
        )
    )


async def a_sequence(bus: NatsBus, response: str, *, index: int, version: int = 0) -> Ref:
    tokens = [*encode(TOKENIZER, f"312={response}"), TOKENIZER.eos_token_id]
    return await bus.store(
        SequenceRecord(
            id=f"sequence_record:p/g0/s{index}:1",
            pipeline="p",
            group="p/g0",
            sequence=f"p/g0/s{index}",
            epoch=1,
            num_prompt_tokens=4,
            tokens=Array.of("int32", tokens),
            logprobs=Array.of("float32", [0.0] * len(tokens)),
            versions=Array.of("int32", [version] * len(tokens)),
            loss_mask=Array.of("uint8", [1] * len(tokens)),
            finish_reason="stop",
        )
    )


async def events(bus: NatsBus, num_sequences: int) -> list[SequencesRewarded]:
    found: list[SequencesRewarded] = []
    async with asyncio.timeout(10):
        async for stored in bus.read_events(0):
            assert isinstance(stored.event, SequencesRewarded)
            found.append(stored.event)
            if sum(len(e.rewarded) + len(e.failed) for e in found) >= num_sequences:
                return found
    raise AssertionError("the stream ended")


def order(group: Ref, record: Ref, *, index: int) -> ScoreOrder:
    return ScoreOrder(sequence=f"p/g0/s{index}", epoch=1, group=group, record=record)


async def test_each_sequence_gets_the_score_of_its_generated_text(
    bus: NatsBus, reward: Reward
) -> None:
    group = await a_group(bus)
    responses = ("123", "321", "")
    records = [await a_sequence(bus, text, index=i) for i, text in enumerate(responses)]
    orders = tuple(order(group, record, index=i) for i, record in enumerate(records))
    await reward.handle(ScoreSequences(id="c:1", worker=WORKER, leader_epoch=1, orders=orders))
    rewarded = [entry for event in await events(bus, 3) for entry in event.rewarded]
    assert {entry.sequence: entry.reward for entry in rewarded} == {
        "p/g0/s0": 1.0,
        "p/g0/s1": 0.0,
        "p/g0/s2": 0.0,
    }
    for entry in rewarded:
        record = await bus.load(entry.ref)
        assert isinstance(record, RewardRecord)
        assert record.response_text == responses[int(entry.sequence[-1])]
        assert record.correct == (record.reward == 1.0)


async def test_a_sequence_whose_record_is_gone_fails_with_the_reason_and_spares_the_others(
    bus: NatsBus, reward: Reward
) -> None:
    group = await a_group(bus)
    record = await a_sequence(bus, "123", index=0)
    gone = Ref(record.stream, record.sequence + 100)
    orders = (order(group, record, index=0), order(group, gone, index=1))
    await reward.handle(ScoreSequences(id="c:1", worker=WORKER, leader_epoch=1, orders=orders))
    found = await events(bus, 2)
    assert [entry.sequence for event in found for entry in event.rewarded] == ["p/g0/s0"]
    failed = [entry for event in found for entry in event.failed]
    assert [entry.sequence for entry in failed] == ["p/g0/s1"]
    assert "no longer stored" in failed[0].reason


async def test_a_repeated_command_stores_no_second_record(bus: NatsBus, reward: Reward) -> None:
    group = await a_group(bus)
    record = await a_sequence(bus, "123", index=0)
    command = ScoreSequences(
        id="c:1", worker=WORKER, leader_epoch=1, orders=(order(group, record, index=0),)
    )
    await reward.handle(command)
    await reward.handle(command)
    refs = {entry.ref for event in await events(bus, 2) for entry in event.rewarded}
    assert len(refs) == 1


async def test_evaluation_is_answered_in_order(bus: NatsBus, reward: Reward) -> None:
    serving = asyncio.ensure_future(reward.run())
    answers = tuple(
        Answer(problem={"answer": "123"}, tokens=Array.of("int32", encode(TOKENIZER, text)))
        for text in ("123", "132", "123")
    )
    scores = await bus.request("p.reward", ScoreQuery(id="q:1", answers=answers), timeout_s=20)
    assert isinstance(scores, Scores)
    assert [score and score.correct for score in scores.scores] == [True, False, True]
    with pytest.raises(BusError, match="answers ScoreQuery only"):
        await bus.request("p.reward", HeldOutQuery(id="q:2", start=0, count=1), timeout_s=5)
    serving.cancel()


async def test_how_long_the_last_scores_of_a_version_took_is_told(
    bus: NatsBus, reward: Reward
) -> None:
    group = await a_group(bus)
    running = asyncio.create_task(reward.run())
    for index, version in enumerate((0, 0, 1)):
        record = await a_sequence(bus, "123", index=index, version=version)
        orders = (order(group, record, index=index),)
        command_id = f"c:{index}"
        await reward.handle(
            ScoreSequences(id=command_id, worker=WORKER, leader_epoch=1, orders=orders)
        )
    async with asyncio.timeout(10):
        async for stored in bus.read_events(0):
            if isinstance(stored.event, SubStagesEnded):
                break
    running.cancel()
    (span,) = stored.event.spans
    assert (span.kind, span.version, span.num_iterations) == ("reward_wait", 0, 1)
    assert span.duration_s > 0
