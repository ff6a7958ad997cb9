"""The environment's handlers, on a real bus."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.config import (
    InitModelConfig,
    JsonlTaskConfig,
    PathModelConfig,
    PipelineConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.commands import Configure, GroupOrder, MakeGroups
from jigsawrl.contract.events import GroupsMade
from jigsawrl.contract.message import Worker
from jigsawrl.contract.records import GroupRecord
from jigsawrl.contract.requests import HeldOut, HeldOutQuery
from jigsawrl.models.tokenizer import build_tokenizer, decode
from jigsawrl.tasks import build_task
from services.environment.environment import Environment
from services.run import Context, RefusedError

WORKER = Worker(id="p.environment0", boot="b1")
TASK = SortDigitsConfig(num_held_out=25)


def pipeline(task: SortDigitsConfig | JsonlTaskConfig = TASK, **model: str) -> PipelineConfig:
    return PipelineConfig(
        name="p",
        model=PathModelConfig(path=model["path"]) if model else InitModelConfig(),
        task=task,
        trainer=TrainerConfig(num_steps=1),
    )


async def configured(bus: NatsBus, config: PipelineConfig) -> Environment:
    environment = Environment(
        Context(bus=bus, worker=WORKER, pipeline="p", run_folder=None, device=None)
    )
    command = Configure(
        id="c:0",
        worker=WORKER,
        leader_epoch=1,
        config=encode_config(config),
        incarnation=0,
        gang_epoch=0,
    )
    await environment.configure(config, command)
    return environment


@pytest.fixture
async def environment(bus: NatsBus) -> Environment:
    return await configured(bus, pipeline())


def make(*cursors: int) -> MakeGroups:
    orders = tuple(GroupOrder(group=f"p/g{c}", epoch=1, cursor=c) for c in cursors)
    return MakeGroups(id="c:7", worker=WORKER, leader_epoch=1, orders=orders)


async def first_event(bus: NatsBus) -> GroupsMade:
    async with asyncio.timeout(10):
        async for stored in bus.read_events(0):
            assert isinstance(stored.event, GroupsMade)
            return stored.event
    raise AssertionError("the stream ended")


async def test_one_command_is_answered_by_one_event_that_names_every_group(
    bus: NatsBus, environment: Environment
) -> None:
    await environment.handle(make(0, 5, 9))
    event = await first_event(bus)
    assert [made.group for made in event.made] == ["p/g0", "p/g5", "p/g9"]
    assert not event.failed
    tokenizer = build_tokenizer("0123456789=")
    for made, cursor in zip(event.made, (0, 5, 9), strict=True):
        record = await bus.load(made.ref)
        assert isinstance(record, GroupRecord)
        problem = build_task(TASK, seed=0).train(cursor)
        assert record.prompt_text == problem.prompt
        assert record.problem == problem.fields
        assert decode(tokenizer, record.prompt_tokens.tolist()) == problem.prompt
        assert made.num_prompt_tokens == len(problem.prompt)


async def test_a_repeated_command_stores_no_second_record(
    bus: NatsBus, environment: Environment
) -> None:
    await environment.handle(make(0, 1))
    await environment.handle(make(0, 1))
    assert ((await bus.fill(bus.subjects.data_stream("p").name)).num_messages) == 2


async def test_a_prompt_that_fails_is_told_with_its_reason_and_spares_the_others(
    bus: NatsBus, tmp_path: Path
) -> None:
    # The record of one problem exceeds what the server takes; the others go through.
    lines = [{"prompt": str(n), "answer": 1} for n in range(20)]
    for line in lines[:10]:
        line["proof"] = "7" * 9_000_000
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    task = JsonlTaskConfig(path=str(path), reward="exact")
    environment = await configured(bus, pipeline(task))
    await environment.handle(make(*range(10)))
    event = await first_event(bus)
    assert {g.group for g in (*event.made, *event.failed)} == {f"p/g{c}" for c in range(10)}
    assert event.made
    assert event.failed
    assert "training prompt" in event.failed[0].reason


async def test_held_out_problems_come_in_pages_and_end(
    bus: NatsBus, environment: Environment
) -> None:
    serving = asyncio.ensure_future(environment.run())
    task = build_task(TASK, seed=0)
    problems = []
    for start in (0, 10, 20):
        query = HeldOutQuery(id=f"q:{start}", start=start, count=10)
        page = await bus.request("p.environment", query, timeout_s=5)
        assert isinstance(page, HeldOut)
        assert page.total == 25
        problems += page.problems
    assert [p.prompt_text for p in problems] == [task.held_out(i).prompt for i in range(25)]
    query = HeldOutQuery(id="q:bad", start=0, count=0)
    with pytest.raises(BusError, match="count must be 1 or more"):
        await bus.request("p.environment", query, timeout_s=5)
    serving.cancel()


async def test_a_task_or_tokenizer_that_cannot_work_is_refused_in_one_line(
    bus: NatsBus, tmp_path: Path
) -> None:
    missing = JsonlTaskConfig(path=str(tmp_path / "none.jsonl"), reward="exact")
    with pytest.raises(RefusedError, match=r"can't read .*none\.jsonl"):
        await configured(bus, pipeline(missing))
    with pytest.raises(RefusedError, match="no tokenizer in"):
        await configured(bus, pipeline(path=str(tmp_path)))
