"""Counts of a pipeline's sequences by what is done with them, kept where they change.

`groups` and `dispatch` call `leave` before a sequence changes its stage or owner, and `enter` where it
then waits or generates; `admission` calls `enter` for new ones. Whoever needs a count then walks no
groups, which every decision and every sub-stage event would otherwise do. `invariants.check` compares
with a full walk.
"""

from __future__ import annotations

from jigsawrl.core.group import GENERATING, Sequence
from jigsawrl.core.state import Pipeline


def enter(pipeline: Pipeline, sequence: Sequence) -> None:
    """A sequence in flight has its stage and owner from now on."""
    if sequence.stage == "waiting":
        pipeline.num_waiting += 1
    elif sequence.stage in GENERATING and sequence.owner is not None:
        worker = sequence.owner.id
        _set(pipeline, worker, pipeline.num_generating.get(worker, 0) + 1)


def leave(pipeline: Pipeline, sequence: Sequence) -> None:
    """A sequence in flight is about to have another stage or owner, or to end."""
    if sequence.stage == "waiting":
        pipeline.num_waiting -= 1
    elif sequence.stage in GENERATING and sequence.owner is not None:
        worker = sequence.owner.id
        _set(pipeline, worker, pipeline.num_generating[worker] - 1)


def _set(pipeline: Pipeline, worker: str, count: int) -> None:
    before = pipeline.num_generating.pop(worker, 0)
    if count:
        pipeline.num_generating[worker] = count
    if _kind(pipeline, before) != _kind(pipeline, count):
        pipeline.turned[worker] = True


def _kind(pipeline: Pipeline, count: int) -> int:
    """0 nothing, 1 a tail, 2 more."""
    return (count > 0) + (count > pipeline.tail_sequences)


def counted(pipeline: Pipeline) -> tuple[int, dict[str, int]]:
    """(waiting, generating by worker) by a full walk: what the counts must be."""
    num_waiting, generating = 0, dict[str, int]()
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            if sequence.stage == "waiting":
                num_waiting += 1
            elif sequence.stage in GENERATING and sequence.owner is not None:
                worker = sequence.owner.id
                generating[worker] = generating.get(worker, 0) + 1
    return num_waiting, generating
