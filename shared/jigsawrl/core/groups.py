"""The life of groups and their sequences after admission: made, placed, finished, scored, ended.

Folds what environment, rollout and reward report. Anything of an older epoch or boot, or of an
object that is not in flight, is ignored and counted: that is what makes repeats harmless.
"""

from __future__ import annotations

import math

from jigsawrl.contract.events import (
    GroupsMade,
    Inventory,
    SequencesAccepted,
    SequencesFinished,
    SequencesProgressed,
    SequencesRewarded,
)
from jigsawrl.contract.message import Worker
from jigsawrl.core import ids, tally
from jigsawrl.core.group import GENERATING, Group, Sequence
from jigsawrl.core.state import Fate, Pipeline, State


def find(pipeline: Pipeline, sequence: str) -> tuple[Group, Sequence] | None:
    """A sequence in flight outside any cut, by id."""
    parsed = ids.parse_sequence(pipeline.name, sequence)
    group = pipeline.groups.get(parsed[0]) if parsed else None
    if group is None or parsed is None or parsed[1] >= len(group.sequences):
        return None
    return group, group.sequences[parsed[1]]


def held(
    pipeline: Pipeline, sequence: str, *, epoch: int, worker: Worker
) -> tuple[Group, Sequence] | None:
    """The sequence, if `worker` owns it under `epoch`."""
    found = find(pipeline, sequence)
    if found is None or found[1].epoch != epoch or found[1].owner != worker:
        return None
    return found


# --- Taking work back and ending -----------------------------------------------------------------


def reclaim(pipeline: Pipeline, group: Group, sequence: Sequence) -> None:
    """Take a sequence from its owner: the next one gets it under a higher epoch, and goes on from the
    last record that is known."""
    if sequence.stage == "scoring":
        sequence.epoch += 1
        sequence.owner = None
        sequence.stage = "finished"
        pipeline.to_score.append((group.number, sequence.index))
    else:
        sequence.restarts.append(sequence.num_resumed)
        sequence.target = None
        queue(pipeline, group, sequence)


def queue(pipeline: Pipeline, group: Group, sequence: Sequence) -> None:
    """Have a live sequence placed under a higher epoch."""
    tally.leave(pipeline, sequence)
    sequence.epoch += 1
    sequence.owner = None
    sequence.num_missing = 0
    sequence.stage = "waiting"
    tally.enter(pipeline, sequence)
    if group.number not in pipeline.to_place:
        pipeline.to_place.append(group.number)


def reclaim_prompt(pipeline: Pipeline, group: Group) -> None:
    """Have another make the prompt."""
    group.epoch += 1
    group.owner = None
    pipeline.to_make.append(group.number)


def free(pipeline: Pipeline, worker: Worker) -> None:
    """Take back everything a boot owned."""
    for group in pipeline.groups.values():
        if group.owner == worker and group.prompt is None:
            reclaim_prompt(pipeline, group)
        for sequence in group.sequences:
            if sequence.owner == worker:
                reclaim(pipeline, group, sequence)


def end(pipeline: Pipeline, group: Group, fate: Fate) -> None:
    """Give a group and its sequences their fate. Sequences that failed on their own stay failed;
    the survivors of a failed group are discarded. Whoever still holds one is told to forget it."""
    in_flight = pipeline.groups.pop(group.number, None) is not None
    pipeline.group_fates[fate].add(group.number)
    rest: Fate = "discarded" if fate == "failed" else fate
    for sequence in group.sequences:
        own: Fate = "failed" if sequence.stage == "failed" else rest
        pipeline.sequence_fates[own].add(_number(pipeline, group, sequence))
        if in_flight:
            tally.leave(pipeline, sequence)
        if sequence.stage in GENERATING and sequence.owner is not None:
            _drop(pipeline, sequence.owner.id, group, sequence)


def revive(pipeline: Pipeline, group: Group) -> None:
    """Undo the fate `trained`, when the version it led to is rolled back."""
    pipeline.group_fates["trained"].remove(group.number)
    for sequence in group.sequences:
        own: Fate = "failed" if sequence.stage == "failed" else "trained"
        pipeline.sequence_fates[own].remove(_number(pipeline, group, sequence))


def fail_sequence(pipeline: Pipeline, group: Group, sequence: Sequence, reason: str) -> None:
    """One sample is lost for good; below `min_group_size` survivors its group is, too."""
    tally.leave(pipeline, sequence)
    sequence.stage = "failed"
    sequence.owner = sequence.target = None
    if group.num_survivors < pipeline.spec.min_group_size:
        fail_group(pipeline, group, reason)


def fail_group(pipeline: Pipeline, group: Group, reason: str) -> None:
    """The group can't be trained; its slot goes to the next prompt."""
    end(pipeline, group, "failed")
    pipeline.num_failed_in_row += 1
    pipeline.last_group_failure = reason


def _number(pipeline: Pipeline, group: Group, sequence: Sequence) -> int:
    return group.number * pipeline.spec.group_size + sequence.index


def _drop(pipeline: Pipeline, worker: str, group: Group, sequence: Sequence) -> None:
    name = ids.sequence_id(pipeline.name, group.number, sequence.index)
    pipeline.drops.setdefault(worker, []).append((name, sequence.epoch))


# --- Folding -------------------------------------------------------------------------------------


def made(state: State, pipeline: Pipeline, event: GroupsMade) -> None:
    """Prompts exist."""
    for entry in event.made:
        group = _making(pipeline, entry.group, entry.epoch)
        if group is None:
            state.num_ignored += 1
            continue
        group.prompt = entry.ref
        group.owner = None
        pipeline.note_ref(entry.ref)
        pipeline.to_place.append(group.number)
    for failure in event.failed:
        group = _making(pipeline, failure.group, failure.epoch)
        if group is None:
            state.num_ignored += 1
        else:
            fail_group(pipeline, group, failure.reason)


def _making(pipeline: Pipeline, name: str, epoch: int) -> Group | None:
    number = ids.parse_group(pipeline.name, name)
    group = pipeline.groups.get(number) if number is not None else None
    if group is None or group.prompt is not None or group.epoch != epoch or group.owner is None:
        return None
    return group


def accepted(state: State, pipeline: Pipeline, event: SequencesAccepted) -> None:
    """The accept lease is answered."""
    for entry in event.accepted:
        found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=event.worker)
        if found is None or found[1].stage != "placed":
            state.num_ignored += 1
        else:
            found[1].stage = "running"
            found[1].avoid = None


def progressed(state: State, pipeline: Pipeline, event: SequencesProgressed) -> None:
    """A later owner may go on from here."""
    for entry in event.progress:
        found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=event.worker)
        if found is None or found[1].stage not in GENERATING:
            state.num_ignored += 1
        else:
            pipeline.note_ref(entry.ref)
            found[1].resume, found[1].num_resumed = entry.ref, entry.num_tokens
            found[1].resume_version = _newest_version(pipeline, event.worker)


def _newest_version(pipeline: Pipeline, worker: Worker) -> int:
    """That a worker can have by now: it may have loaded what it was told to load and not said so."""
    tenant = pipeline.tenants[worker.id]
    told = -1 if tenant.loading is None else tenant.loading[1]
    return max(0, told, -1 if tenant.version is None else tenant.version)


def _versions_possible(pipeline: Pipeline, oldest: int, newest: int) -> bool:
    """Whether weights of these versions can have made tokens: they were published."""
    return pipeline.version is not None and oldest <= newest <= pipeline.version


def finished(state: State, pipeline: Pipeline, event: SequencesFinished) -> None:
    """Samples are whole, or can't be made."""
    for entry in event.finished:
        found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=event.worker)
        if found is None or found[1].stage not in GENERATING:
            state.num_ignored += 1
            continue
        group, sequence = found
        if not _versions_possible(pipeline, entry.min_version, entry.max_version):
            told = f"tokens of versions {entry.min_version} to {entry.max_version}"
            fail_sequence(
                pipeline, group, sequence, f"{entry.sequence}: {event.worker.id} tells of {told}"
            )
            continue
        pipeline.note_ref(entry.ref)
        if entry.finish_reason == "aborted":
            reclaim(pipeline, group, sequence)
            continue
        tally.leave(pipeline, sequence)
        sequence.stage = "finished"
        sequence.owner = None
        sequence.record = entry.ref
        sequence.target = None
        sequence.resume = None
        again = sum(max(0, entry.num_tokens - start) for start in sequence.restarts)
        pipeline.num_tokens_again += again
        sequence.restarts = []
        sequence.min_version = entry.min_version
        sequence.max_version = entry.max_version
        pipeline.to_score.append((group.number, sequence.index))
    for failure in event.failed:
        found = held(pipeline, failure.sequence, epoch=failure.epoch, worker=event.worker)
        if found is None or found[1].stage not in GENERATING:
            state.num_ignored += 1
        else:
            fail_sequence(pipeline, *found, failure.reason)


def rewarded(state: State, pipeline: Pipeline, event: SequencesRewarded) -> None:
    """Scores; one that is not a number is a failure, not a zero (a zero would be trained on)."""
    for entry in event.rewarded:
        found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=event.worker)
        if found is None or found[1].stage != "scoring":
            state.num_ignored += 1
            continue
        pipeline.note_ref(entry.ref)
        if not math.isfinite(entry.reward):
            fail_sequence(pipeline, *found, f"{entry.sequence}: reward {entry.reward}")
        else:
            sequence = found[1]
            sequence.stage = "scored"
            sequence.owner = None
            sequence.reward = entry.ref
            sequence.score = entry.reward
    for failure in event.failed:
        found = held(pipeline, failure.sequence, epoch=failure.epoch, worker=event.worker)
        if found is None or found[1].stage != "scoring":
            state.num_ignored += 1
        else:
            fail_sequence(pipeline, *found, failure.reason)


def inventory(pipeline: Pipeline, event: Inventory) -> None:
    """Square what a worker holds with what it owns. A running sequence counts as lost when two
    inventories in a row do not name it: the first may have crossed its placement or its end."""
    names = {(entry.sequence, entry.epoch) for entry in event.held}
    for entry in event.held:
        found = held(pipeline, entry.sequence, epoch=entry.epoch, worker=event.worker)
        if found is None:
            pipeline.drops.setdefault(event.worker.id, []).append((entry.sequence, entry.epoch))
    for group in list(pipeline.groups.values()):
        for sequence in group.sequences:
            if sequence.owner != event.worker or sequence.stage not in ("running", "moving"):
                continue
            name = ids.sequence_id(pipeline.name, group.number, sequence.index)
            if (name, sequence.epoch) in names:
                sequence.num_missing = 0
            elif sequence.num_missing:
                reclaim(pipeline, group, sequence)
            else:
                sequence.num_missing = 1
