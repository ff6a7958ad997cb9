"""A rollout worker hands over what it is told to, and answers id by id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.config import DrawnLengthsConfig, RolloutConfig, SamplingConfig, TorchEngineConfig
from jigsawrl.contract.commands import MigrateSequences
from jigsawrl.contract.events import SequencesExported, SequencesFinished
from jigsawrl.contract.message import Array, Ref
from jigsawrl.contract.parts import Held
from jigsawrl.contract.records import Record, SequenceRecord
from tests.services.rollout_site import CONFIG, PROMPT, Site, placement, rollout_site

NUM_TOKENS = 400
LONG = msgspec.structs.replace(
    CONFIG,
    rollout=RolloutConfig(
        sampling=SamplingConfig(max_new_tokens=NUM_TOKENS),
        engine=TorchEngineConfig(
            max_running=2,
            deterministic=True,
            drawn_lengths=DrawnLengthsConfig(
                median_tokens=NUM_TOKENS, p95_tokens=NUM_TOKENS, max_tokens=NUM_TOKENS
            ),
        ),
    ),
)
"""Sequences that live for a second or so; two run at once."""


class GatedBus:
    """A bus that stores no sequence while `open` is not set."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self.open = asyncio.Event()
        self.open.set()

    async def store(self, record: Record) -> Ref:
        if isinstance(record, SequenceRecord):
            await self.open.wait()
        return await self._bus.store(record)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)


@pytest.fixture
def gated(bus: NatsBus) -> GatedBus:
    return GatedBus(bus)


@pytest.fixture
async def site(gated: GatedBus) -> AsyncIterator[Site]:
    async with rollout_site(gated, LONG) as made:
        await made.load(0)
        yield made


async def migrate(site: Site, *sequences: tuple[str, int]) -> SequencesExported:
    await site.tell(MigrateSequences, sequences=sequences)
    return await site.next(SequencesExported)


async def partial(site: Site, num_tokens: int, *, version: int = 0) -> Ref:
    """A stored record of so many tokens."""
    num_prompt = len(PROMPT)
    record = SequenceRecord(
        id=f"partial:{num_tokens}:{version}",
        pipeline="p",
        group="g0",
        sequence="g0/s0",
        epoch=1,
        num_prompt_tokens=num_prompt,
        tokens=Array.of("int32", PROMPT + [5] * num_tokens),
        logprobs=Array.of("float32", [0.0] * num_prompt + [-1.0] * num_tokens),
        versions=Array.of("int32", [-1] * num_prompt + [version] * num_tokens),
        loss_mask=Array.of("uint8", [0] * num_prompt + [1] * num_tokens),
        finish_reason=None,
    )
    return await site.bus.store(record)


async def finished_record(site: Site) -> SequenceRecord:
    return await site.record((await site.next(SequencesFinished)).finished[0].ref)


async def test_a_running_sequence_goes_on_from_its_record_with_the_same_bits(site: Site) -> None:
    group = await site.prompt()
    await site.place(placement("g0/s0", group))
    whole = await finished_record(site)
    await site.place(placement("g0/s1", group), placement("g0/s2", group, seed=9))
    moves = 0
    epoch = 1
    while moves < 4:
        await asyncio.sleep(0.1)
        answer = await migrate(site, ("g0/s1", epoch))
        if not answer.exported:
            break
        export = answer.exported[0]
        assert (export.sequence, export.epoch) == ("g0/s1", epoch)
        assert (export.min_version, export.max_version) == (0, 0)
        assert export.ref is not None
        record = await site.record(export.ref)
        assert record.finish_reason is None
        assert record.loss_mask.tolist().count(1) == export.num_tokens
        num = len(PROMPT) + export.num_tokens
        assert record.tokens.tolist() == whole.tokens.tolist()[:num]
        epoch, moves = epoch + 1, moves + 1
        await site.place(placement("g0/s1", group, epoch=epoch, resume=export.ref))
    assert moves > 1
    ends: dict[str, Any] = {}
    site.rewind()  # the other one may have ended while moves were waited for
    while not {"g0/s1", "g0/s2"} <= ends.keys():
        ends |= {one.sequence: one for one in (await site.next(SequencesFinished)).finished}
    moved = await site.record(ends["g0/s1"].ref)
    assert (ends["g0/s1"].epoch, ends["g0/s2"].epoch) == (epoch, 1)
    assert moved.tokens == whole.tokens
    assert moved.logprobs == whole.logprobs
    assert moved.versions == whole.versions


async def test_what_waits_is_exported_with_the_tokens_it_has(site: Site) -> None:
    group = await site.prompt()
    resume = await partial(site, 3)
    await site.place(
        *(placement(f"g0/s{i}", group, seed=i) for i in range(2)),  # take both slots
        placement("g1/s0", group),
        placement("g1/s1", group, resume=resume, epoch=2),
        placement("g2/s0", group, min_version=1),
        placement("g2/s1", group, min_version=1, resume=resume),
    )
    waiting = (("g1/s0", 1), ("g1/s1", 2), ("g2/s0", 1), ("g2/s1", 1))
    answer = await migrate(site, *waiting)
    assert [(one.sequence, one.epoch) for one in answer.exported] == list(waiting)
    assert all(one.ref is None for one in answer.exported), "no token was made here"
    assert [one.num_tokens for one in answer.exported] == [0, 3, 0, 3]
    assert [one.max_version for one in answer.exported] == [None, 0, None, 0]
    again = await migrate(site, *waiting)
    assert again.not_held == tuple(Held(*one) for one in waiting)
    await site.load(1)
    names = set()
    while len(names) < 2:
        names |= {one.sequence for one in (await site.next(SequencesFinished)).finished}
    assert names == {"g0/s0", "g0/s1"}, "nothing else is generated here any more"


async def test_what_it_does_not_hold_under_this_epoch_is_not_held(site: Site) -> None:
    group = await site.prompt()
    await site.place(placement("g0/s0", group, epoch=2))
    asked = (("g0/s0", 1), ("g0/s0", 3), ("g9/s9", 1))
    answer = await migrate(site, *asked)
    assert answer.not_held == tuple(Held(*one) for one in asked)
    assert (answer.exported, answer.finished) == ((), ())
    assert (await finished_record(site)).epoch == 2


async def test_a_repeated_command_finds_nothing_any_more(site: Site) -> None:
    group = await site.prompt()
    await site.place(placement("g0/s0", group))
    first = await migrate(site, ("g0/s0", 1), ("g0/s0", 1))
    assert len(first.exported) == 1
    assert (await migrate(site, ("g0/s0", 1))).not_held == (Held("g0/s0", 1),)
    assert first.id != (await migrate(site, ("g0/s0", 1))).id


async def test_what_has_ended_is_finished_and_told_once(site: Site, gated: GatedBus) -> None:
    group = await site.prompt()
    gated.open.clear()
    almost = await partial_unheld(site, gated, NUM_TOKENS - 1)
    await site.place(placement("g0/s0", group, resume=almost), placement("g1/s0", no_prompt(group)))
    await asyncio.sleep(0.5)
    answer = await migrate(site, ("g0/s0", 1), ("g1/s0", 1))
    assert answer.finished == (Held("g0/s0", 1), Held("g1/s0", 1))
    assert (answer.exported, answer.not_held) == ((), ())
    gated.open.set()
    end = await site.next(SequencesFinished)
    assert [one.sequence for one in (*end.finished, *end.failed)] == ["g0/s0", "g1/s0"]
    assert len((await migrate(site, ("g0/s0", 1))).not_held) == 1


async def partial_unheld(site: Site, gated: GatedBus, num_tokens: int) -> Ref:
    gated.open.set()
    ref = await partial(site, num_tokens)
    gated.open.clear()
    return ref


def no_prompt(group: Ref) -> Ref:
    return Ref(group.stream, group.sequence + 1000)


async def test_nothing_is_freed_before_it_is_stored(site: Site, gated: GatedBus) -> None:
    group = await site.prompt()
    await site.place(placement("g0/s0", group))
    await asyncio.sleep(0.05)
    gated.open.clear()
    moving = asyncio.create_task(migrate(site, ("g0/s0", 1)))
    await asyncio.sleep(0.2)
    assert not moving.done()
    assert site.held() == (Held("g0/s0", 1),)
    gated.open.set()
    answer = await moving
    assert [one.sequence for one in answer.exported] == ["g0/s0"]
    await asyncio.sleep(0.05)
    assert site.held() == ()


async def test_an_import_waits_for_the_last_version_of_its_record(site: Site) -> None:
    group = await site.prompt()
    resume = await partial(site, NUM_TOKENS - 5, version=2)
    await site.place(placement("g0/s0", group, epoch=2, resume=resume))
    await site.load(1)
    await asyncio.sleep(0.3)
    answer = await migrate(site, ("g0/s0", 2))
    assert (answer.exported[0].ref, answer.exported[0].max_version) == (None, 2)
    await site.place(placement("g0/s0", group, epoch=3, resume=resume))
    await site.load(2)
    assert set((await finished_record(site)).versions.tolist()[len(PROMPT) :]) == {2}
