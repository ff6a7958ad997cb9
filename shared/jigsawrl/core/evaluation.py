"""Held-out evaluations: which versions are due, the one that runs, results.

One at a time. The first version and the last are never skipped; another that comes due while one
still runs or waits is skipped and counted. Evaluation stands outside conservation and blocks nothing
but the end of its pipeline.
"""

from __future__ import annotations

import math

from jigsawrl.contract.commands import Evaluate
from jigsawrl.contract.events import EvaluationFailed, EvaluationFinished
from jigsawrl.contract.requests import EvaluationResult
from jigsawrl.core import pipelines
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Evaluation, Pipeline, State

MAX_FAILURES = 3
"""Failures of one evaluation before its pipeline fails."""


def version_due(pipeline: Pipeline, version: int) -> None:
    """Queue or skip the evaluation of a version that was just published."""
    spec = pipeline.spec.evaluation
    if spec is None:
        return
    always = version in (pipeline.base_version, pipeline.spec.num_steps)
    if not always and (spec.every is None or version % spec.every):
        return
    if not always and (pipeline.evaluation is not None or pipeline.evaluations_due):
        pipeline.evaluations_skipped.append(version)
        return
    pipeline.evaluations_due.append(version)


def pinned(pipeline: Pipeline) -> list[int]:
    """Versions that must stay on the weight channel for it."""
    running = [] if pipeline.evaluation is None else [pipeline.evaluation.version]
    return [*running, *pipeline.evaluations_due]


def void(pipeline: Pipeline, version: int) -> None:
    """A rollback to `version`: later versions never were; results, skips and what runs or waits of them
    are void, and they come due again in the new incarnation.

    Versions up to it are the same weights in both incarnations, so that what is known of them stands.
    One that an evaluation worker has goes on, and its result counts; where `version`'s old copy is
    purged before the worker has it, it fails and is sent again. What is sent from here on is sent in
    the new incarnation: `version` itself once it has been published again, an older one from where it
    lies still."""
    if pipeline.evaluation is not None and pipeline.evaluation.version > version:
        pipeline.evaluation = None
    pipeline.evaluations_due = [v for v in pipeline.evaluations_due if v <= version]
    pipeline.evaluations = [r for r in pipeline.evaluations if r.version <= version]
    pipeline.evaluations_skipped = [v for v in pipeline.evaluations_skipped if v <= version]


def finished(state: State, pipeline: Pipeline, event: EvaluationFinished) -> None:
    """A result."""
    running = pipeline.evaluation
    counted = event.num_correct <= event.num_problems and math.isfinite(event.mean_reward)
    if running is None or not _answers(running, event) or not counted:
        state.num_ignored += 1
        return
    pipeline.evaluation = None
    pipeline.evaluations.append(
        EvaluationResult(
            version=event.version,
            accuracy=event.num_correct / event.num_problems if event.num_problems else 0.0,
            num_problems=event.num_problems,
            mean_reward=event.mean_reward,
        )
    )


def failed(state: State, pipeline: Pipeline, event: EvaluationFailed) -> None:
    """Again, up to a bound."""
    running = pipeline.evaluation
    if running is None or not _answers(running, event):
        state.num_ignored += 1
        return
    running.num_failures += 1
    running.sent_to = None
    if running.num_failures >= MAX_FAILURES:
        reason = (
            f"evaluation of version {event.version} failed {MAX_FAILURES} times, at last:"
            f" {event.reason}"
        )
        pipelines.fail(state, pipeline, reason)


def _answers(running: Evaluation, event: EvaluationFinished | EvaluationFailed) -> bool:
    return (running.incarnation, running.version, running.sent_to) == (
        event.incarnation,
        event.version,
        event.worker,
    )


def evaluate(pipeline: Pipeline, outbox: Outbox) -> None:
    """Start the next one due, or repeat the running one to a new boot."""
    if pipeline.evaluation is None and pipeline.evaluations_due:
        version = pipeline.evaluations_due.pop(0)
        pipeline.evaluation = Evaluation(version=version, incarnation=pipeline.incarnation)
    running = pipeline.evaluation
    if running is None or running.sent_to is not None:
        return
    published = pipeline.published.get(running.version)
    tenants = pipeline.usable("evaluation")
    if not tenants or published is None:
        return
    running.attempt += 1
    running.sent_to = tenants[0].worker
    running.incarnation = pipeline.incarnation
    outbox.add(
        Evaluate(
            **outbox.to(running.sent_to),
            incarnation=running.incarnation,
            version=running.version,
            manifest=published.manifest,
            attempt=running.attempt,
        )
    )
