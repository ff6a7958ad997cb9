"""Sequences of several turns on a rollout worker, with a real environment service beside it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.config import (
    PipelineConfig,
    RolloutConfig,
    SamplingConfig,
    SortDigitsConfig,
    TorchEngineConfig,
    encode_config,
)
from jigsawrl.contract.commands import Configure, Drop, MigrateSequences
from jigsawrl.contract.events import (
    SequencesExported,
    SequencesFinished,
    SequencesProgressed,
    SubStagesEnded,
    WorkerStarted,
)
from jigsawrl.contract.message import Ref, Worker
from jigsawrl.contract.parts import Held, SequenceFinish
from jigsawrl.contract.records import SequenceRecord
from jigsawrl.models.tokenizer import decode
from jigsawrl.turns import turn_spans
from services.environment.environment import Environment
from services.run import Context
from tests.services.rollout_site import CONFIG, PROMPT, Site, placement, rollout_site

MAX_NEW_TOKENS = 7
ANSWER = "1234"


def twice(*, delay_s: float = 0.0, max_running: int = 8) -> PipelineConfig:
    return msgspec.structs.replace(
        CONFIG,
        task=SortDigitsConfig(num_held_out=5, num_turns=2, turn_delay_s=delay_s),
        rollout=RolloutConfig(
            sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS),
            engine=TorchEngineConfig(max_running=max_running, deterministic=True),
        ),
    )


def configure(config: PipelineConfig, worker: Worker) -> Configure:
    return Configure(
        id=f"c:{worker.boot}",
        worker=worker,
        leader_epoch=1,
        config=encode_config(config),
        incarnation=0,
        gang_epoch=0,
    )


@asynccontextmanager
async def serving(bus: NatsBus, config: PipelineConfig) -> AsyncIterator[None]:
    """An environment service, for the length of a block."""
    worker = Worker(id="p.environment0", boot="b")
    context = Context(bus=bus, worker=worker, pipeline="p", run_folder=None, device=None)
    environment = Environment(context)
    await environment.configure(config, configure(config, worker))
    running = asyncio.create_task(environment.run())
    yield
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@asynccontextmanager
async def both(bus: NatsBus, config: PipelineConfig) -> AsyncIterator[Site]:
    async with serving(bus, config), rollout_site(bus, config) as site:
        await site.load(0)
        yield site


async def ends(site: Site, *sequences: str) -> list[tuple[SequenceFinish, SequenceRecord]]:
    """How sequences ended, in this order."""
    found: dict[str, SequenceFinish] = {}
    site.rewind()
    while not set(sequences) <= found.keys():
        event = await site.next(SequencesFinished)
        assert not event.failed, event.failed
        found |= {one.sequence: one for one in event.finished}
    return [(found[name], await site.record(found[name].ref)) for name in sequences]


async def waiting(
    site: Site, group: Ref, sequence: str, *, epoch: int = 1, resume: Ref | None = None
) -> tuple[int, Ref]:
    """Move a sequence until it is moved while it waits for its environment: the epoch that it had then,
    and its record."""
    while True:
        await site.tell(MigrateSequences, sequences=((sequence, epoch),))
        answer = await site.next(SequencesExported)
        (export,) = answer.exported
        resume = export.ref or resume
        record = None if resume is None else await site.record(resume)
        if record is not None and record.turn_finish_reason is not None:
            assert resume is not None
            return epoch, resume
        epoch += 1
        await site.place(placement(sequence, group, epoch=epoch, resume=resume))
        await asyncio.sleep(0.05)


async def test_a_sequence_has_its_turns_and_what_was_said_between_them(bus: NatsBus) -> None:
    async with both(bus, twice()) as site:
        await site.place(placement("g0/s0", await site.prompt(answer=ANSWER)))
        ((end, record),) = await ends(site, "g0/s0")
    num_prompt = len(PROMPT)
    versions, tokens = record.versions.tolist(), record.tokens.tolist()
    (begin, first_end), (second, last) = turn_spans(versions)
    assert (begin, last) == (num_prompt, len(tokens))
    text = decode(site.tokenizer, tokens[begin:first_end])
    marks = "".join("+" if a == b else "-" for a, b in zip(ANSWER, text.ljust(4), strict=False))
    assert decode(site.tokenizer, tokens[first_end:second]) == f"{marks}="
    own = [position for span in ((begin, first_end), (second, last)) for position in range(*span)]
    for position in range(len(tokens)):
        generated = position in own
        assert versions[position] == (0 if generated else -1)
        assert record.loss_mask.tolist()[position] == generated
        assert (record.logprobs.tolist()[position] < 0) == generated
    assert record.num_prompt_tokens == num_prompt
    assert record.turn_finish_reason is None
    assert end.finish_reason == record.finish_reason
    assert (end.num_tokens, end.min_version, end.max_version) == (len(own), 0, 0)


async def test_an_episode_that_is_over_has_no_other_turn(bus: NatsBus) -> None:
    async with both(bus, twice()) as site:
        await site.place(placement("g0/s0", await site.prompt(answer="")))
        ((_, wrong),) = await ends(site, "g0/s0")
        begin, end = turn_spans(wrong.versions.tolist())[0]
        said = decode(site.tokenizer, wrong.tokens.tolist()[begin:end])
        await site.place(placement("g1/s0", await site.prompt("g1", answer=said)))
        ((_, right),) = await ends(site, "g1/s0")
    assert turn_spans(right.versions.tolist()) == [(begin, end)]
    assert right.tokens.tolist() == wrong.tokens.tolist()[:end]
    assert right.finish_reason is not None


async def test_a_sequence_that_moves_while_it_waits_has_the_bits_of_one_that_stayed(
    bus: NatsBus,
) -> None:
    async with both(bus, twice(delay_s=1.0)) as site:
        group = await site.prompt(answer=ANSWER)
        await site.place(placement("g0/s0", group), placement("g0/s1", group))
        epoch, resume = await waiting(site, group, "g0/s1")
        for moves in range(1, 4):  # nothing is new then, so what it was placed with still holds
            await site.place(placement("g0/s1", group, epoch=epoch + moves, resume=resume))
            await site.tell(MigrateSequences, sequences=(("g0/s1", epoch + moves),))
            (export,) = (await site.next(SequencesExported)).exported
            assert export.ref is None
            assert export.num_tokens == sum((await site.record(resume)).loss_mask.tolist())
        await site.place(placement("g0/s1", group, epoch=epoch + 4, resume=resume))
        (_, stayed), (end, moved) = await ends(site, "g0/s0", "g0/s1")
    assert end.epoch == epoch + 4
    assert len(turn_spans(stayed.versions.tolist())) == 2
    for field in ("tokens", "logprobs", "versions", "loss_mask", "finish_reason"):
        assert getattr(moved, field) == getattr(stayed, field)


async def test_what_waits_leaves_its_slot_to_others(bus: NatsBus) -> None:
    async with both(bus, twice(delay_s=3.0, max_running=1)) as site:
        group = await site.prompt(answer=ANSWER)
        names = [f"g0/s{i}" for i in range(3)]
        await site.place(*(placement(name, group, seed=i) for i, name in enumerate(names)))
        for name in names:  # all wait together, though one runs at a time
            await waiting(site, group, name)


async def test_weights_that_come_while_it_waits_make_the_next_turn(bus: NatsBus) -> None:
    async with both(bus, twice(delay_s=1.0)) as site:
        group = await site.prompt(answer=ANSWER)
        await site.place(placement("g0/s0", group))
        epoch, resume = await waiting(site, group, "g0/s0")
        await site.place(placement("g0/s0", group, epoch=epoch + 1, resume=resume))
        await site.load(1)
        ((end, record),) = await ends(site, "g0/s0")
    versions = record.versions.tolist()
    assert [set(versions[slice(*span)]) for span in turn_spans(versions)] == [{0}, {1}]
    assert (end.min_version, end.max_version) == (0, 1)


async def test_what_is_dropped_while_it_waits_is_forgotten(bus: NatsBus) -> None:
    async with both(bus, twice(delay_s=1.0)) as site:
        group = await site.prompt(answer=ANSWER)
        await site.place(placement("g0/s0", group), placement("g0/s1", group))
        epoch, resume = await waiting(site, group, "g0/s0")
        await site.place(placement("g0/s0", group, epoch=epoch + 1, resume=resume))
        await site.tell(Drop, sequences=(("g0/s0", epoch + 1),))
        assert site.held() == (Held("g0/s1", 1),)
        await ends(site, "g0/s1")
        await site.place(placement("g0/s2", group))
        site.rewind()
        names: list[str] = []
        while "g0/s2" not in names:
            names += [one.sequence for one in (await site.next(SequencesFinished)).finished]
    assert names == ["g0/s1", "g0/s2"]


async def test_a_partial_record_of_a_sequence_that_waits_asks_the_same_turn(bus: NatsBus) -> None:
    async with both(bus, twice(delay_s=7.0)) as site:  # partial records come every three seconds
        group = await site.prompt(answer=ANSWER)
        await site.place(placement("g0/s0", group), placement("g0/s1", group))
        progress = (await site.next(SequencesProgressed)).progress
        (partial,) = (one for one in progress if one.sequence == "g0/s1")
        record = await site.record(partial.ref)
        assert record.turn_finish_reason is not None
        assert record.finish_reason is None
        assert partial.num_tokens == sum(record.loss_mask.tolist())
        await site.place(placement("g0/s1", group, epoch=2, resume=partial.ref))
        (_, stayed), (end, resumed) = await ends(site, "g0/s0", "g0/s1")
    assert end.epoch == 2
    assert (resumed.tokens, resumed.logprobs) == (stayed.tokens, stayed.logprobs)


async def test_what_the_environment_can_not_answer_fails_alone_with_the_reason(
    bus: NatsBus,
) -> None:
    async with both(bus, twice()) as site:
        no_answer = await site.prompt("g0")  # a problem that the task does not understand
        await site.place(placement("g0/s0", no_answer))
        (failure,) = (await site.next(SequencesFinished)).failed
        assert failure.sequence == "g0/s0"
        assert failure.reason.startswith("rollout: the environment failed turn 1: ")
        assert "KeyError: 'answer'" in failure.reason
        await site.place(placement("g1/s0", await site.prompt("g1", answer=ANSWER)))
        assert [one.sequence for one in (await site.next(SequencesFinished)).finished] == ["g1/s0"]


async def test_waiting_is_told_as_a_sub_stage_where_nothing_else_is_to_do(bus: NatsBus) -> None:
    async with both(bus, twice(delay_s=1.0)) as site:
        group = await site.prompt(answer=ANSWER)
        await site.place(*(placement(f"g0/s{i}", group, seed=i) for i in range(4)))
        spans = []
        while not any(span.kind == "tool_wait" for span in spans):
            spans += (await site.next(SubStagesEnded)).spans
        (wait,) = (span for span in spans if span.kind == "tool_wait")
    assert wait.version == 0
    assert wait.num_tokens == 0
    assert 0 < wait.duration_s <= wait.ended_s - wait.started_s + 1e-3, "once, not four times"


@pytest.mark.timeout(120)
async def test_an_environment_that_is_killed_while_it_thinks_is_waited_for(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str
) -> None:
    config = twice(delay_s=1.0)

    async def start(boot: str) -> asyncio.subprocess.Process:
        """A process of its own, configured as a scheduler would."""
        worker = Worker(id="p.environment0", boot=boot)
        arguments = ["--url", nats_server.url, "--prefix", prefix, "--pipeline", "p"]
        arguments += ["--worker", worker.id, "--boot", boot]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.environment", *arguments
        )
        while (await site.next(WorkerStarted)).worker != worker:
            pass
        await bus.publish_command(configure(config, worker))
        return process

    async with rollout_site(bus, config) as site:
        await site.load(0)
        group = await site.prompt(answer=ANSWER)
        first = await start("b1")
        try:
            await site.place(placement("g0/s0", group), placement("g0/s1", group))
            await waiting(site, group, "g0/s1")
        finally:
            first.kill()
            await first.wait()
        assert Held("g0/s0", 1) in site.held()
        second = await start("b2")
        try:
            ((_, record),) = await ends(site, "g0/s0")
        finally:
            second.kill()
            await second.wait()
    assert len(turn_spans(record.versions.tolist())) == 2
