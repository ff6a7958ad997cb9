"""Beginning and end of a pipeline."""

from __future__ import annotations

import math

from jigsawrl.contract.events import PipelineSubmitted
from jigsawrl.contract.spec import PipelineSpec
from jigsawrl.contract.streams import NAME_PATTERN
from jigsawrl.core import shares
from jigsawrl.core.groups import end
from jigsawrl.core.pace import begin_again
from jigsawrl.core.state import Pipeline, PipelineStage, State, new_pipeline

MAX_PROCESSES = 4096
"""Of one role, as configurations have it: the scheduler keeps something for each."""

MAX_GROUPS = 2**20
"""In a batch, and sequences in a group: more fit into no snapshot."""

MIN_FAILED_IN_ROW = 64
"""Groups that fail in a row, with none trained between, before a pipeline is given up: at least
this many, and four batches."""

SUBMISSION_WAIT_S = 60.0
"""Stream time that a pipeline waits for companions to be submitted, and as long as a client tries."""

ROOM_WAIT_S = 5.0
"""Stream time that it waits for a queued companion: who can be placed is, in the next decision."""

MAX_SUBMISSIONS = 100
"""Under one name, whose ids are kept: repeats come from publishers that waited out a restart or a
freeze, and never so late."""


def submitted(state: State, event: PipelineSubmitted) -> Pipeline | None:
    """Queue a pipeline; None where it is not new. A name may be used again after its pipeline ended
    and its tenants were told to stop; gang epochs go on rising, so that what an old trainer says is
    not taken for the new one's word. A repeat is ignored, also when its pipeline has ended: the server
    knows ids for two minutes only."""
    if not _is_sound(event.spec):
        state.num_ignored += 1
        return None
    known = state.pipelines.get(event.spec.name)
    past = [] if known is None else known.submissions
    if event.id in past or (known is not None and (known.live or known.stops)):
        state.num_ignored += 1
        return None
    gang_epoch = 0 if known is None else known.gang_epoch
    state.pipelines.pop(event.spec.name, None)
    submissions = [*past, event.id][-MAX_SUBMISSIONS:]
    pipeline = new_pipeline(
        event.spec,
        event.config,
        gang_epoch=gang_epoch,
        submissions=submissions,
        companions=event.companions,
    )
    pipeline.submitted_s = state.clock.now_s
    state.pipelines[event.spec.name] = pipeline
    state.touch(pipeline)
    return pipeline


def _is_sound(spec: PipelineSpec) -> bool:
    """Decisions can be made for it. Submissions are checked before (`jigsawrl.config`), but whoever
    reaches a server without credentials can store the event itself, and what can't be decided upon
    would end every leader that reads it, for ever."""
    numbers = (
        spec.num_steps,
        spec.groups_per_batch,
        spec.group_size,
        spec.min_group_size,
        spec.num_rollout_workers,
        spec.num_trainer_ranks,
        spec.pipeline_depth,
    )
    every = None if spec.evaluation is None else spec.evaluation.every
    promised = (spec.terms.weight, spec.terms.max_slowdown)
    return (
        NAME_PATTERN.fullmatch(spec.name) is not None
        and min(numbers) > 0
        and max(spec.num_rollout_workers, spec.num_trainer_ranks) <= MAX_PROCESSES
        and max(spec.groups_per_batch, spec.group_size) <= MAX_GROUPS
        and every != 0
        and all(value is None or (math.isfinite(value) and value > 0) for value in promised)
    )


def fail(state: State, pipeline: Pipeline, reason: str) -> None:
    """End a pipeline that can't go on; the others never notice."""
    if pipeline.live:
        pipeline.failure = reason
        _end(state, pipeline, "failed")


def give_up(state: State, pipeline: Pipeline) -> None:
    """Fail a pipeline whose groups all fail."""
    bound = max(MIN_FAILED_IN_ROW, 4 * pipeline.spec.groups_per_batch)
    if pipeline.num_failed_in_row >= bound:
        reason = f"{bound} groups in a row failed, the last: {pipeline.last_group_failure}"
        fail(state, pipeline, reason)


def pause(pipeline: Pipeline) -> None:
    """Begin nothing more of it; what runs goes on to its end, so that nothing is made twice."""
    pipeline.paused = True


def resume(state: State, pipeline: Pipeline) -> None:
    """Go on. The time of the pause counts against no promise."""
    if pipeline.paused:
        pipeline.paused = False
        begin_again(pipeline, now_s=state.clock.now_s)


def why_paused(pipeline: Pipeline) -> str | None:
    """What it waits for, for people; None where it is not paused."""
    return f"its user: jigsaw resume {pipeline.name}" if pipeline.paused else None


def rests(pipeline: Pipeline) -> bool:
    """Paused, with nothing under way on a device."""
    cut = pipeline.open_cut
    trains = cut is not None and cut.sent_gang == pipeline.gang_epoch
    return pipeline.paused and not trains and not any(pipeline.num_generating.values())


def missing_companion(state: State, pipeline: Pipeline) -> str | None:
    """What a pipeline that shall begin together with others waits for, for people; None once it has
    begun, or all of them are ready, have ended, or can't come: one that finds no room would wait for
    this one's, and one that is not submitted soon may never be."""
    waited_s = state.clock.now_s - pipeline.submitted_s
    if has_begun(pipeline):
        return None
    for name in pipeline.companions:
        other = state.pipelines.get(name)
        if other is None:
            if waited_s < SUBMISSION_WAIT_S:
                return f"pipeline {name} to be submitted"
        elif other.stage == "queued":
            if state.clock.now_s - other.submitted_s < ROOM_WAIT_S:
                return f"pipeline {name} to find room"
        elif other.live and not _is_ready(other):
            return f"pipeline {name} to be ready"
    return None


def has_begun(pipeline: Pipeline) -> bool:
    """Something of it was placed."""
    past_first = pipeline.version is not None and pipeline.version > pipeline.base_version
    return past_first or bool(pipeline.cuts) or pipeline.placed_since_s is not None


def _is_ready(pipeline: Pipeline) -> bool:
    """All its tenants take work, and generate by the newest version."""
    return pipeline.version is not None and all(
        tenant.usable and (tenant.role != "rollout" or tenant.version == pipeline.version)
        for tenant in pipeline.tenants.values()
    )


def finish(state: State, pipeline: Pipeline) -> None:
    """End a pipeline whose last version is evaluated and checkpointed."""
    last = pipeline.spec.num_steps
    evaluated = pipeline.evaluation is None and not pipeline.evaluations_due
    if pipeline.stage == "finishing" and evaluated and (pipeline.checkpoint_version or 0) >= last:
        _end(state, pipeline, "finished")


def _end(state: State, pipeline: Pipeline, stage: PipelineStage) -> None:
    pipeline.running_s = running_s(state, pipeline)
    pipeline.running_since_s = None
    pipeline.stage = stage
    shares.move_out(state, pipeline)
    batch = pipeline.open_cut
    for group in [*(batch.groups if batch else ()), *pipeline.groups.values()]:
        end(pipeline, group, "discarded")
    pipeline.cuts = []
    pipeline.drops = {}
    pipeline.to_make, pipeline.to_place, pipeline.to_score = [], [], []
    pipeline.evaluation, pipeline.evaluations_due = None, []
    pipeline.publish_due = False
    pipeline.restarts = {}
    pipeline.stops = list(pipeline.tenants)
    state.outlooks.late = [name for name in state.outlooks.late if name != pipeline.name]
    state.touch(pipeline)


def running_s(state: State, pipeline: Pipeline) -> float:
    """Stream time since its first version was published, until its end."""
    if pipeline.running_since_s is None:
        return pipeline.running_s
    return state.clock.now_s - pipeline.running_since_s
