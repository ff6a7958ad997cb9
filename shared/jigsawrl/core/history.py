"""Versions: what is published, what a restarted trainer brings back, what a checkpoint covers.

The checkpoint, not the ack, is the truth: a gang that comes back below the newest published version
starts a new incarnation. Cut c (its version) is trained again; later cuts are void; groups whose
tokens are all of versions up to c stay in admission order; the others are discarded, and their
prompts return to the head of the data cursor under new group ids.
"""

from __future__ import annotations

import math

from jigsawrl.contract.commands import PublishWeights
from jigsawrl.contract.events import CheckpointCommitted, VersionPublished
from jigsawrl.contract.message import Ledger
from jigsawrl.core import evaluation, observing, pace, pipelines, profiles
from jigsawrl.core.group import Group
from jigsawrl.core.groups import end, revive
from jigsawrl.core.ledger import begin_after
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Cut, Pipeline, Published, State
from jigsawrl.core.workers import current


def trainer_ready(state: State, pipeline: Pipeline, version: int, ledger: Ledger) -> None:
    """A gang restored `version`; roll back where that is older than what is published. Where this
    history begins with it, prompts and ids go on behind its `ledger`."""
    newest, batch = pipeline.version, pipeline.open_cut
    if newest is None:
        try:
            begin_after(pipeline, ledger)
        except ValueError as error:
            pipelines.fail(state, pipeline, f"the trainer restored version {version}: {error}")
            return
        pipeline.base_version = version
    elif version < newest:
        if all(kept.version != version for kept in pipeline.cuts):
            reason = f"the trainer restored version {version}, whose batch is no longer kept"
            pipelines.fail(state, pipeline, reason)
            return
        roll_back(pipeline, version)
        pace.begin_again(pipeline, now_s=state.clock.now_s)
    elif version > newest and (batch is None or version != newest + 1):
        reason = (
            f"the trainer restored version {version}, but version {newest} is the newest of this"
            " run: use another run folder"
        )
        pipelines.fail(state, pipeline, reason)
        return
    pipeline.trainer_version = version
    pipeline.publish_due = True
    pipeline.checkpoint_version = version


def roll_back(pipeline: Pipeline, version: int) -> None:
    """Make `version` the newest of a new incarnation."""
    newest = version if pipeline.version is None else pipeline.version
    pipeline.incarnation += 1
    kept: list[Cut] = []
    back: list[Group] = []
    returned: list[int] = []
    for batch in pipeline.cuts:
        if batch.trained and batch.version >= version:
            for group in batch.groups:
                revive(pipeline, group)
            pipeline.num_trained_tokens -= batch.num_trained_tokens
        if batch.version > version:
            back.extend(batch.groups)
            continue
        if batch.version == version:
            batch.trained, batch.sent_gang, batch.num_trained_tokens = False, None, 0
        kept.append(batch)
    pipeline.cuts = kept
    for group in [*back, *pipeline.groups.values()]:
        if group.max_version(newest) > version:
            returned.append(group.cursor)
            end(pipeline, group, "discarded")
        else:
            pipeline.groups[group.number] = group
    pipeline.groups = dict(sorted(pipeline.groups.items()))
    pipeline.returned_cursors = sorted([*pipeline.returned_cursors, *returned])
    pipeline.version = version
    pipeline.published = {v: p for v, p in pipeline.published.items() if v < version}
    pipeline.placed_since_s = None
    pipeline.stage = "running"
    evaluation.void(pipeline, version)
    observing.rolled_back(pipeline, version=version)


def published(state: State, pipeline: Pipeline, event: VersionPublished) -> None:
    """A version lies on the weight channel: the next one, or the newest again."""
    newest, batch = pipeline.version, pipeline.open_cut
    known = (
        current(pipeline, event.worker, role="trainer") is not None
        and event.gang_epoch == pipeline.gang_epoch
        and event.incarnation == pipeline.incarnation
    )
    first = newest is None and event.version == pipeline.base_version
    again = event.version == newest
    following = newest is not None and batch is not None and event.version == newest + 1
    if not known or not (first or again or following):
        state.num_ignored += 1
        return
    pipeline.published[event.version] = Published(pipeline.incarnation, event.manifest)
    pipeline.trainer_version = event.version
    if again:
        return
    pipeline.version = event.version
    observing.step_ended(pipeline, version=event.version, now_s=state.clock.now_s)
    pace.step_ended(pipeline, now_s=state.clock.now_s, table=profiles.table(state))
    if batch is not None:
        _train(pipeline, batch, event.num_trained_tokens)
    if event.metrics:
        finite = {name: value for name, value in event.metrics.items() if math.isfinite(value)}
        pipeline.metrics = finite
    if first:
        pipeline.stage = "running"
        pipeline.running_since_s = state.clock.now_s
    evaluation.version_due(pipeline, event.version)
    if event.version >= pipeline.spec.num_steps:
        pipeline.stage = "finishing"
    _forget(pipeline)


def _train(pipeline: Pipeline, batch: Cut, num_tokens: int) -> None:
    batch.trained = True
    batch.num_trained_tokens = num_tokens
    pipeline.num_trained_tokens += num_tokens
    pipeline.num_failed_in_row = 0
    for group in batch.groups:
        end(pipeline, group, "trained")


def checkpointed(state: State, pipeline: Pipeline, event: CheckpointCommitted) -> None:
    """What it covers can't be rolled back any more."""
    known = (
        current(pipeline, event.worker, role="trainer") is not None
        and event.gang_epoch == pipeline.gang_epoch
        and event.incarnation == pipeline.incarnation
    )
    newest = pipeline.base_version if pipeline.version is None else pipeline.version
    # A step's checkpoint is told before its version; the first one before the trainer is ready.
    possible = event.version <= newest + 1 or pipeline.version is None
    if not known or not possible or event.version < (pipeline.checkpoint_version or 0):
        state.num_ignored += 1
        return
    pipeline.checkpoint_version = event.version
    _forget(pipeline)


def _forget(pipeline: Pipeline) -> None:
    covered = pipeline.checkpoint_version or 0
    pipeline.cuts = [c for c in pipeline.cuts if not c.trained or c.version >= covered]
    needed = evaluation.pinned(pipeline)
    pipeline.published = {
        v: p for v, p in pipeline.published.items() if v == pipeline.version or v in needed
    }


def data_needed_from(pipeline: Pipeline) -> int:
    """First data-stream sequence that a group in flight or a cut may still refer to: what the
    service may purge before."""
    groups = [*pipeline.groups.values(), *(g for batch in pipeline.cuts for g in batch.groups)]
    return min((group.data_floor for group in groups), default=pipeline.data_sequence) + 1


def publish(pipeline: Pipeline, outbox: Outbox) -> None:
    """Have a gang that came up announce what it holds: again, where it had been announced."""
    if not pipeline.publish_due or not pipeline.gang_usable:
        return
    assert pipeline.trainer_version is not None
    for rank in pipeline.gang:
        outbox.add(
            PublishWeights(
                **outbox.to(rank.worker),
                incarnation=pipeline.incarnation,
                gang_epoch=pipeline.gang_epoch,
                version=pipeline.trainer_version,
                retain_versions=pipeline.retained,
            )
        )
    pipeline.publish_due = False
