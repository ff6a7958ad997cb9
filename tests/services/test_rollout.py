"""The rollout tenant over a real nats-server with a real engine: placements in, records out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.commands import Drop, PlaceSequences
from jigsawrl.contract.events import Inventory, SequencesFinished, SubStagesEnded
from jigsawrl.contract.message import Array, Ref
from jigsawrl.contract.parts import Held
from jigsawrl.contract.records import SequenceRecord
from tests.services.rollout_site import PROMPT, Site, placement, rollout_site


@pytest.fixture
async def site(bus: NatsBus) -> AsyncIterator[Site]:
    async with rollout_site(bus) as made:
        yield made


async def test_placed_sequences_come_back_as_records_before_the_event_names_them(
    site: Site,
) -> None:
    await site.load(0)
    group = await site.prompt()
    accepted = await site.place(placement("g0/s0", group), placement("g0/s1", group, seed=8))
    assert accepted.accepted == (Held("g0/s0", 1), Held("g0/s1", 1))
    told: dict[str, Any] = {}
    while len(told) < 2:
        told |= {one.sequence: one for one in (await site.next(SequencesFinished)).finished}
    for name, finish in told.items():
        record = await site.record(finish.ref)
        assert (record.sequence, record.group, record.epoch) == (name, "g0", 1)
        assert record.tokens.tolist()[: len(PROMPT)] == PROMPT
        generated = record.loss_mask.tolist().count(1)
        assert generated == finish.num_tokens > 0
        assert record.versions.tolist() == [-1] * len(PROMPT) + [0] * generated
        assert all(logprob < 0 for logprob in record.logprobs.tolist()[len(PROMPT) :])
    first, second = [await site.record(told[name].ref) for name in sorted(told)]
    assert first.tokens.tolist() != second.tokens.tolist(), "another seed draws other tokens"


async def test_the_same_seed_gives_the_same_tokens_whoever_generates_beside_it(site: Site) -> None:
    await site.load(0)
    group = await site.prompt()
    tokens = []
    for beside in ([], [placement(f"x{i}", group, seed=i) for i in range(5)]):
        name = f"g0/s{len(beside)}"
        await site.place(placement(name, group), *beside)
        while True:
            finished = (await site.next(SequencesFinished)).finished
            mine = [one for one in finished if one.sequence == name]
            if mine:
                tokens.append((await site.record(mine[0].ref)).tokens.tolist())
                break
    assert tokens[0] == tokens[1]


async def test_sequences_wait_for_the_version_that_they_need(site: Site) -> None:
    await site.load(0)
    group = await site.prompt()
    await site.place(placement("g0/s0", group, min_version=1))
    await asyncio.sleep(0.3)
    await site.load(1)
    finished = (await site.next(SequencesFinished)).finished
    assert (finished[0].min_version, finished[0].max_version) == (1, 1)


async def test_a_prompt_that_is_gone_fails_its_sequence_with_the_reason(site: Site) -> None:
    await site.load(0)
    group = await site.prompt()
    gone = Ref(group.stream, group.sequence + 1000)
    await site.place(placement("g1/s0", gone))
    failed = (await site.next(SequencesFinished)).failed
    assert [(one.sequence, one.epoch) for one in failed] == [("g1/s0", 1)]
    assert "no longer stored" in failed[0].reason


async def test_a_prompt_longer_than_the_model_fails_its_sequence_with_the_reason(
    site: Site,
) -> None:
    await site.load(0)
    group = await site.prompt("long", PROMPT * 200)
    await site.place(placement("long/s0", group))
    failed = (await site.next(SequencesFinished)).failed
    assert failed[0].sequence == "long/s0"
    assert "800" in failed[0].reason


async def test_a_partial_record_is_continued_and_keeps_its_versions(site: Site) -> None:
    await site.load(0)
    group = await site.prompt()
    await site.place(placement("g0/s0", group))
    ref = (await site.next(SequencesFinished)).finished[0].ref
    whole = await site.record(ref)
    start = len(PROMPT)
    cut = start + 1
    partial = SequenceRecord(
        id="partial",
        pipeline="p",
        group="g0",
        sequence="g0/s0",
        epoch=1,
        num_prompt_tokens=start,
        tokens=Array.of("int32", whole.tokens.tolist()[:cut]),
        logprobs=Array.of("float32", whole.logprobs.tolist()[:cut]),
        versions=Array.of("int32", whole.versions.tolist()[:cut]),
        loss_mask=Array.of("uint8", whole.loss_mask.tolist()[:cut]),
        finish_reason=None,
    )
    resume = await site.bus.store(partial)
    await site.load(1)
    await site.place(placement("g0/s0", group, epoch=2, resume=resume))
    finish = (await site.next(SequencesFinished)).finished[0]
    record = await site.record(finish.ref)
    assert finish.epoch == 2
    assert record.tokens.tolist()[:cut] == whole.tokens.tolist()[:cut]
    assert record.versions.tolist()[start:cut] == [0]
    assert set(record.versions.tolist()[cut:]) <= {1}


async def test_dropped_sequences_are_forgotten_and_the_inventory_says_so(site: Site) -> None:
    first = await site.next(Inventory)
    assert first.held == ()
    group = await site.prompt()
    await site.place(placement("g0/s0", group), placement("g0/s1", group, epoch=3))  # no weights
    await site.tell(Drop, sequences=(("g0/s0", 1), ("g0/s1", 2)))
    assert (await site.next(Inventory)).held == (Held("g0/s1", 3),)


async def test_sequences_and_weights_of_an_older_incarnation_are_refused(site: Site) -> None:
    await site.load(0, incarnation=1)
    group = await site.prompt()
    await site.tell(PlaceSequences, incarnation=0, placements=(placement("old", group),))
    await site.place(placement("new", group), incarnation=1)
    finished = (await site.next(SequencesFinished)).finished
    assert [one.sequence for one in finished] == ["new"]


async def test_what_was_done_is_told_as_sub_stages(site: Site) -> None:
    await site.load(0)
    await site.place(placement("g0/s0", await site.prompt()))
    site.rewind()
    kinds: set[str] = set()
    tokens = 0
    while not ({"weight_sync", "prefill"} <= kinds and kinds & {"bulk_decode", "tail_decode"}):
        event = await site.next(SubStagesEnded)
        kinds |= {span.kind for span in event.spans}
        tokens += sum(span.num_tokens for span in event.spans)
    assert tokens >= len(PROMPT)
