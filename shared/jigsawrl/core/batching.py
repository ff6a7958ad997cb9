"""The batch of a step: exactly B groups, the first B in admission order; fewer only where dynamic
sampling is told to train smaller batches when its prompts run out.

The cut is recorded before it is sent. A trainer that restarts gets the same cut again, so each group
stands in exactly one cut of the surviving history.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from jigsawrl.contract.commands import BatchCut, TrainedGroup, TrainedSequence
from jigsawrl.contract.events import SubStagesEnded
from jigsawrl.contract.message import Ref
from jigsawrl.contract.parts import SubStage
from jigsawrl.core import ids, observing
from jigsawrl.core.admission import drop_stale
from jigsawrl.core.filtering import trains_smaller
from jigsawrl.core.group import Group
from jigsawrl.core.ledger import ledger_after
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Cut, Pipeline, State, Tenant
from jigsawrl.core.workers import current

MAX_SPAN_S = 86_400.0
"""A day: spans are told twice a second or at the end of a phase. Sums of what is below are far from
what a float can't hold, and a look-ahead over them ends."""


def measure(state: State, pipeline: Pipeline, event: SubStagesEnded) -> None:
    """Sum up sub-stages of living boots for the metrics of the next cut, with the share that the node
    of each reported last; nothing divides the device of a tenant of which none was."""
    tenant = current(pipeline, event.worker)
    if tenant is None:
        state.num_ignored += 1
        return
    spans = tuple(filter(_believable, event.spans))
    state.num_ignored += len(event.spans) - len(spans)
    observing.reported(state, pipeline, tenant, msgspec.structs.replace(event, spans=spans))
    share = 1.0 if tenant.applied_share is None else tenant.applied_share
    for span in spans:
        seconds, weighted = pipeline.substages.get(span.kind, (0.0, 0.0))
        pipeline.substages[span.kind] = (
            seconds + span.duration_s,
            weighted + span.duration_s * share,
        )


def _believable(span: SubStage) -> bool:
    """Neither negative, endless nor NaN: what is added to the history is there for good."""
    return all(0 <= lasted_s <= MAX_SPAN_S for lasted_s in (span.duration_s, span.cpu_s or 0.0))


def cut(pipeline: Pipeline, now_s: float) -> None:
    """Cut the next batch once its B groups are complete."""
    if pipeline.open_cut is not None or pipeline.version is None or pipeline.stage != "running":
        return
    size = _size(pipeline)
    if len(pipeline.groups) < size:
        return
    first = list(islice(pipeline.groups.values(), size))
    if not first or not all(group.complete for group in first) or drop_stale(pipeline, first):
        return
    for group in first:
        del pipeline.groups[group.number]
    since_s = now_s if pipeline.placed_since_s is None else pipeline.placed_since_s
    pipeline.cuts.append(
        Cut(
            version=pipeline.version,
            groups=first,
            ledger=ledger_after(pipeline, first, cursor=_first_unused_prompt(pipeline)),
            substages={
                kind: (seconds, weighted / seconds if seconds else 0.0)
                for kind, (seconds, weighted) in sorted(pipeline.substages.items())
            },
            rollout_s=now_s - since_s,
        )
    )
    pipeline.substages = {}
    pipeline.placed_since_s = None
    pipeline.num_filtered = 0


def _size(pipeline: Pipeline) -> int:
    size = pipeline.spec.groups_per_batch
    return min(size, len(pipeline.groups)) if trains_smaller(pipeline) else size


def _first_unused_prompt(pipeline: Pipeline) -> int:
    waiting = (group.cursor for group in pipeline.groups.values())
    return min([pipeline.next_cursor, *pipeline.returned_cursors, *waiting])


def send(pipeline: Pipeline, outbox: Outbox) -> None:
    """Give the open cut to all ranks of every gang that stands at its version."""
    batch = pipeline.open_cut
    if batch is None or not pipeline.gang_usable or pipeline.paused:
        return
    if batch.sent_gang == pipeline.gang_epoch or pipeline.trainer_version != batch.version:
        return
    # Once for all ranks: a batch may have thousands of sequences.
    groups = tuple(_trained(pipeline, group) for group in batch.groups)
    for rank in pipeline.gang:
        outbox.add(_command(pipeline, batch, groups, rank, outbox))
    batch.sent_gang = pipeline.gang_epoch


def _command(
    pipeline: Pipeline,
    batch: Cut,
    groups: tuple[TrainedGroup, ...],
    rank: Tenant,
    outbox: Outbox,
) -> BatchCut:
    return BatchCut(
        **outbox.to(rank.worker),
        incarnation=pipeline.incarnation,
        gang_epoch=pipeline.gang_epoch,
        version=batch.version,
        groups=groups,
        ledger=batch.ledger,
        retain_versions=pipeline.retained,
        substages=batch.substages,
        rollout_s=batch.rollout_s,
    )


def _trained(pipeline: Pipeline, group: Group) -> TrainedGroup:
    survivors = []
    for sequence in group.sequences:
        if sequence.stage == "scored":
            name = ids.sequence_id(pipeline.name, group.number, sequence.index)
            survivors.append(
                TrainedSequence(
                    sequence=name, record=_stored(sequence.record), reward=_stored(sequence.reward)
                )
            )
    return TrainedGroup(
        group=ids.group_id(pipeline.name, group.number),
        prompt=_stored(group.prompt),
        sequences=tuple(survivors),
    )


def _stored(ref: Ref | None) -> Ref:
    assert ref is not None
    return ref
