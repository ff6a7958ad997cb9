"""Fates that travel through a checkpoint and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract.commands import BatchCut, MakeGroups
from jigsawrl.contract.message import Ledger
from jigsawrl.core import invariants
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.ids import IdRanges
from jigsawrl.core.ledger import begin_after, ledger_after
from jigsawrl.core.state import FATES, new_pipeline
from tests.unit.core.world import Faults, World, asynchronous, spec

NUM_GROUPS = 12


def cuts(world: World) -> list[BatchCut]:
    return [x for batch in world.issued for x in batch if isinstance(x, BatchCut)]


@given(st.lists(st.sampled_from([*FATES, None]), min_size=NUM_GROUPS, max_size=NUM_GROUPS))
def test_each_group_keeps_its_fate_and_what_was_in_flight_is_discarded(
    fates: list[str | None],
) -> None:
    size = spec().group_size
    old = new_pipeline(spec(), b"", gang_epoch=0)
    old.num_admitted = NUM_GROUPS + 1
    for number, fate in enumerate(fates):
        if fate is not None:
            old.group_fates[fate].add(number)  # type: ignore[index]
            for index in range(size):
                old.sequence_fates[fate].add(number * size + index)  # type: ignore[index]
    sequences = [Sequence(index=i, stage="failed" if i == 0 else "scored") for i in range(size)]
    last = Group(number=NUM_GROUPS, cursor=0, data_floor=0, sequences=sequences)
    new = new_pipeline(spec(), b"", gang_epoch=0)
    begin_after(new, ledger_after(old, [last], cursor=7))
    expected = ["discarded" if fate is None else fate for fate in fates] + ["trained"]
    for number, fate in enumerate(expected):
        assert number in new.group_fates[fate]  # type: ignore[index]
    assert sum(len(kept) for kept in new.group_fates.values()) == NUM_GROUPS + 1
    assert sum(len(kept) for kept in new.sequence_fates.values()) == size * (NUM_GROUPS + 1)
    assert NUM_GROUPS * size in new.sequence_fates["failed"]
    assert (new.next_cursor, new.num_admitted) == (7, NUM_GROUPS + 1)
    for kept in new.group_fates.values():
        again = IdRanges()
        for number in kept.numbers():
            again.add(number)
        assert again.ranges == kept.ranges


@pytest.mark.parametrize(
    "groups",
    [
        {"trained": ((0, 5),)},
        {"trained": ((0, 2),), "stale": ((1, 3),)},
        {"trained": ((2, 1),)},
    ],
)
def test_fates_that_can_not_be_are_refused(
    groups: dict[str, tuple[tuple[int, int], ...]],
) -> None:
    pipeline = new_pipeline(spec(), b"", gang_epoch=0)
    with pytest.raises(ValueError, match="not those of this pipeline"):
        begin_after(pipeline, Ledger(num_admitted=3, groups=groups))
    assert pipeline.num_admitted == 0


def test_a_history_that_begins_at_a_checkpoint_goes_on_with_its_ids_and_fates() -> None:
    before = World(seed=0, faults=Faults(), pipelines=[asynchronous(2, num_steps=9)])
    before.run_until(lambda: before.scheduler.state.pipelines["p"].version == 5)
    after = World(seed=0, faults=Faults(), pipelines=[asynchronous(2, num_steps=9)])
    after.checkpoints, after.ledgers = {"p": 4}, before.ledgers
    after.run()
    pipeline = after.scheduler.state.pipelines["p"]
    assert pipeline.stage == "finished"
    assert pipeline.num_trained_before == 4 * 3
    assert len(pipeline.group_fates["trained"]) == 9 * 3
    old = {g.group for cut in cuts(before) if cut.version < 4 for g in cut.groups}
    new = {g.group for cut in cuts(after) for g in cut.groups}
    assert len(new) == 5 * 3
    assert not old & new
    made = [x for batch in after.issued for x in batch if isinstance(x, MakeGroups)]
    cursors = {order.cursor for make in made for order in make.orders}
    assert cursors >= set(range(4 * 3, 9 * 3))
    invariants.check(after.scheduler.state)


def test_a_checkpoint_whose_fates_can_not_be_of_the_pipeline_fails_it() -> None:
    world = World(seed=0, faults=Faults(), pipelines=[spec()])
    world.checkpoints["p"] = 1
    world.ledgers["p", 1] = Ledger(num_admitted=3, groups={"trained": ((0, 5),)})
    world.run()
    assert "not those of this pipeline" in (world.scheduler.state.pipelines["p"].failure or "")
    invariants.check(world.scheduler.state)
