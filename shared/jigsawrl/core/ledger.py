"""The fate of every group ever admitted, as it travels with a batch cut into the checkpoint that the
step leads to, and back when a new history begins at that checkpoint.

So ids go on where they stood and every id has one fate over the whole life of a run, even where the
scheduler that counted them is gone with its store.
"""

from __future__ import annotations

from collections.abc import Iterable

from jigsawrl.contract.message import Ledger
from jigsawrl.core.group import Group
from jigsawrl.core.ids import IdRanges
from jigsawrl.core.state import FATES, Fate, Pipeline


def ledger_after(pipeline: Pipeline, groups: Iterable[Group], *, cursor: int) -> Ledger:
    """As it stands once these groups are trained."""
    trained = IdRanges(list(pipeline.group_fates["trained"].ranges))
    sequences = {f: IdRanges(list(pipeline.sequence_fates[f].ranges)) for f in FATES}
    for group in groups:
        trained.add(group.number)
        for sequence in group.sequences:
            fate: Fate = "failed" if sequence.stage == "failed" else "trained"
            sequences[fate].add(group.number * pipeline.spec.group_size + sequence.index)
    fates = {str(f): tuple(pipeline.group_fates[f].ranges) for f in FATES}
    return Ledger(
        cursor=cursor,
        num_admitted=pipeline.num_admitted,
        groups=fates | {"trained": tuple(trained.ranges)},
        sequences={str(f): tuple(kept.ranges) for f, kept in sequences.items()},
    )


def begin_after(pipeline: Pipeline, ledger: Ledger) -> None:
    """Begin a history behind it: what was in flight then is discarded, and its prompts come again.

    Raises ValueError for a ledger that can't be of this pipeline."""
    size = pipeline.spec.group_size
    groups = _fates(ledger.groups, end=ledger.num_admitted)
    sequences = _fates(ledger.sequences, end=ledger.num_admitted * size)
    pipeline.group_fates, pipeline.sequence_fates = groups, sequences
    pipeline.num_admitted = ledger.num_admitted
    pipeline.num_trained_before = len(groups["trained"])
    pipeline.next_cursor = ledger.cursor


def _fates(told: dict[str, tuple[tuple[int, int], ...]], *, end: int) -> dict[Fate, IdRanges]:
    fates: dict[Fate, IdRanges] = {}
    for fate in FATES:
        ranges = [*told.get(fate, ())]
        fates[fate] = IdRanges(ranges, sum(stop - start for start, stop in ranges))
    taken = sorted(part for kept in fates.values() for part in kept.ranges)
    at, gaps = 0, []
    for start, stop in [*taken, (end, end)]:
        if not at <= start <= stop <= end:
            raise ValueError("the checkpoint's fates of groups are not those of this pipeline")
        if at < start:
            gaps.append((at, start))
        at = stop
    merged = sorted([*fates["discarded"].ranges, *gaps])
    count = len(fates["discarded"]) + sum(stop - start for start, stop in gaps)
    fates["discarded"] = IdRanges(_joined(merged), count)
    return fates


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined
