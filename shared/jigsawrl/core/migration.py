"""Moving live sequences between rollout workers: orders, what answers them, and whom to move.

An order has three messages, and at each moment one owner. `MigrateSequences` asks the source, which
stays the owner (stage ``moving``); `SequencesExported` names what it stored, which takes the sequence
from it under the next epoch; `PlaceSequences` gives it to the target, which goes on from the record.
Where the source dies or does not answer, the sequence restarts from the last record that is known, as
after any loss. Policies decide whom to move (`Policy.moves`); `merge_tail` is the rule that frees
workers from the long tail of a batch (paper: sub-stage merging).
"""

from __future__ import annotations

import msgspec

from jigsawrl.contract.commands import MigrateSequences
from jigsawrl.contract.events import SequencesExported
from jigsawrl.contract.message import Worker
from jigsawrl.contract.parts import Held, SequenceExport
from jigsawrl.core import ids
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.groups import find, held, queue, reclaim
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Pipeline, State

EXPORT_LEASE_S = 5.0
"""An order to move is answered within this, as a placement is accepted, or the sequence restarts."""

MIN_STAY_S = 2.0
"""A sequence that was merged stays for this long: a move costs a prefill, and two that undo one another
gain nothing. Several times what a move takes."""


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One running sequence that shall go to another rollout worker."""

    sequence: str
    target: str


# --- Orders --------------------------------------------------------------------------------------


def migrate(pipeline: Pipeline, moves: list[Move], now_s: float, outbox: Outbox) -> None:
    """Order moves, one command for each source. One that can't be made (any more) is left out."""
    if not moves:
        return
    usable = {tenant.id for tenant in pipeline.usable("rollout")}
    orders: dict[Worker, list[tuple[str, int]]] = {}
    for move in moves:
        found = find(pipeline, move.sequence)
        if found is None or found[1].stage != "running" or found[1].owner is None:
            continue
        sequence, source = found[1], found[1].owner
        if source.id == move.target or not {source.id, move.target} <= usable:
            continue
        _order(sequence, move.target, now_s)
        orders.setdefault(source, []).append((move.sequence, sequence.epoch))
    _send(orders, outbox)


def hand_over(pipeline: Pipeline, now_s: float, outbox: Outbox) -> None:
    """Order all that workers of a leaving machine generate to be stored, for whoever can go on."""
    leaving = {tenant.id for tenant in pipeline.tenants.values() if tenant.leaving}
    if not leaving.intersection(pipeline.num_generating):
        return
    orders: dict[Worker, list[tuple[str, int]]] = {}
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            owner = sequence.owner
            if sequence.stage == "running" and owner is not None and owner.id in leaving:
                _order(sequence, None, now_s)
                name = ids.sequence_id(pipeline.name, group.number, sequence.index)
                orders.setdefault(owner, []).append((name, sequence.epoch))
    _send(orders, outbox)


def _order(sequence: Sequence, target: str | None, now_s: float) -> None:
    sequence.stage = "moving"
    sequence.target = target
    sequence.since_s = sequence.moved_s = now_s
    sequence.num_moves += 1


def _send(orders: dict[Worker, list[tuple[str, int]]], outbox: Outbox) -> None:
    for source, sequences in orders.items():
        outbox.add(MigrateSequences(**outbox.to(source), sequences=tuple(sequences)))


# --- Folding -------------------------------------------------------------------------------------


def exported(state: State, pipeline: Pipeline, event: SequencesExported) -> None:
    """A source answers. Only for what it owns and was asked for: all else is ignored and counted."""
    for entry in event.exported:
        found = _moving(state, pipeline, entry, event.worker)
        if found is None:
            continue
        group, sequence = found
        if not _possible(pipeline, entry):
            state.num_ignored += 1
            reclaim(pipeline, group, sequence)
            continue
        _keep(pipeline, sequence, entry)
        queue(pipeline, group, sequence)
    for answer in event.finished:
        found = _moving(state, pipeline, answer, event.worker)
        if found is not None:  # its end is on the way; if not, the inventories show it
            found[1].stage, found[1].target = "running", None
    for answer in event.not_held:
        found = _moving(state, pipeline, answer, event.worker)
        if found is not None:
            reclaim(pipeline, *found)


def _possible(pipeline: Pipeline, entry: SequenceExport) -> bool:
    """Whether a worker can go on from what is handed over: in `sync` none will have a version that is
    not published; where batches overlap, one that comes soon can be waited for."""
    oldest, newest = entry.min_version, entry.max_version
    if oldest is None or newest is None:
        return oldest is newest
    return oldest <= newest <= (pipeline.version or 0) + pipeline.spec.max_staleness


def _moving(
    state: State, pipeline: Pipeline, entry: SequenceExport | Held, worker: Worker
) -> tuple[Group, Sequence] | None:
    found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=worker)
    if found is None or found[1].stage != "moving":
        state.num_ignored += 1
        return None
    return found


def _keep(pipeline: Pipeline, sequence: Sequence, entry: SequenceExport) -> None:
    """The next owner goes on from what the source stored."""
    pipeline.num_migrations += 1
    pipeline.num_migrated_tokens += entry.num_tokens
    if entry.ref is None:
        return
    pipeline.note_ref(entry.ref)
    sequence.resume, sequence.num_resumed = entry.ref, entry.num_tokens
    sequence.min_version, sequence.max_version = entry.min_version, entry.max_version
    sequence.resume_version = entry.max_version or 0


# --- Whom to move --------------------------------------------------------------------------------


def merge_tail(pipeline: Pipeline, *, max_sequences: int, now_s: float) -> list[Move]:
    """Gather a tail on the fewest workers, with the fewest moves.

    Where all unfinished sequences fit into the tail regime (`max_sequences` a worker, where a step
    costs hardly more than that of one sequence) of fewer workers than hold some, those that hold the
    most keep theirs, ties by id, and take those of the others. Nothing moves while prompts or
    sequences are still to come, while another move is under way, or between different weights; and
    no worker gives away what came to it within `MIN_STAY_S`, nor a part of what it holds.
    """
    by_worker: dict[str, list[tuple[str, Sequence]]] = {}
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            if group.prompt is None or sequence.stage in ("waiting", "placed", "moving"):
                return []
            if sequence.stage == "running" and sequence.owner is not None:
                name = ids.sequence_id(pipeline.name, group.number, sequence.index)
                by_worker.setdefault(sequence.owner.id, []).append((name, sequence))
    num_needed = -(-sum(map(len, by_worker.values())) // max_sequences)
    if num_needed >= len(by_worker) or not _same_weights(pipeline, list(by_worker)):
        return []
    ordered = sorted(by_worker, key=lambda name: (-len(by_worker[name]), name))
    room = {name: max_sequences - len(by_worker[name]) for name in ordered[:num_needed]}
    moves = []
    for source in ordered[num_needed:]:
        sequences = by_worker[source]
        if any(s.num_moves and now_s - s.moved_s < MIN_STAY_S for _, s in sequences):
            continue
        for name, _ in sequences:
            target = next(name for name, free in room.items() if free > 0)
            room[target] -= 1
            moves.append(Move(sequence=name, target=target))
    return moves


def _same_weights(pipeline: Pipeline, names: list[str]) -> bool:
    tenants = [pipeline.tenants[name] for name in names]
    return len({(t.incarnation, t.version) for t in tenants}) == 1 and all(
        t.usable and t.loading is None for t in tenants
    )
