"""How a run ended: the JSON object that closes standard output, and the lines for people above it.

Called by `run_command`; a function of the last `Status`, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.contract.requests import EvaluationResult, FateCounts, PipelineStatus, Status


def conserved(counts: FateCounts) -> bool:
    """Nothing is in flight and every admitted id has exactly one fate."""
    return counts.in_flight == 0 and accounted_for(counts)


def accounted_for(counts: FateCounts) -> bool:
    """Every admitted id has exactly one fate or is in flight, as it may be where a run was stopped."""
    fates = counts.trained + counts.filtered + counts.stale + counts.discarded + counts.failed
    return counts.admitted == fates + counts.in_flight


def succeeded(pipeline: PipelineStatus) -> bool:
    """Finished, and nothing was lost on the way."""
    return (
        pipeline.state == "finished"
        and conserved(pipeline.groups)
        and conserved(pipeline.sequences)
    )


def accuracy_at(pipeline: PipelineStatus, version: int) -> EvaluationResult | None:
    """The evaluation of one version; the latest where a rollback led to several."""
    return next((e for e in reversed(pipeline.evaluations) if e.version == version), None)


def tokens_per_s(pipeline: PipelineStatus) -> float:
    """Trained tokens over the time since version 0 was published."""
    return pipeline.num_trained_tokens / pipeline.running_s if pipeline.running_s > 0 else 0.0


def summarize(status: Status | None, *, run_folder: Path) -> dict[str, Any]:
    """What the last line of standard output and ``summary.json`` hold; no pipeline where the run ended
    before the scheduler answered."""
    pipelines = () if status is None else status.pipelines
    return {
        "pipelines": {pipeline.pipeline: _pipeline(pipeline) for pipeline in pipelines},
        "run": str(run_folder),
        "dead_letters": 0 if status is None else status.num_dead_letters,
    }


def to_line(summary: dict[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(summary)


def _pipeline(pipeline: PipelineStatus) -> dict[str, Any]:
    before = accuracy_at(pipeline, 0)
    after = accuracy_at(pipeline, pipeline.num_steps)
    return {
        "state": pipeline.state,
        "version": pipeline.version,
        "eval_before": None if before is None else before.accuracy,
        "eval_after": None if after is None else after.accuracy,
        "groups": msgspec.to_builtins(pipeline.groups),
        "sequences": msgspec.to_builtins(pipeline.sequences),
        "tokens_per_s": round(tokens_per_s(pipeline), 1),
        "num_migrations": pipeline.num_migrations,
        "num_tokens_again": pipeline.num_tokens_again,
        "failure": pipeline.failure,
    }


def describe(status: Status, *, run_folder: Path) -> Iterator[str]:
    """The end of a run in a few lines for people."""
    for pipeline in status.pipelines:
        yield (
            f"{pipeline.pipeline}: {pipeline.state} at version {pipeline.version} of"
            f" {pipeline.num_steps} after {pipeline.running_s:.0f} s,"
            f" {tokens_per_s(pipeline):.0f} tokens/s"
        )
        if pipeline.evaluations:
            evaluations = ", ".join(
                f"{e.accuracy:.3f} (version {e.version})" for e in pipeline.evaluations
            )
            yield f"  held-out accuracy: {evaluations}"
        if pipeline.num_evaluations_skipped:
            yield f"  evaluations skipped: {pipeline.num_evaluations_skipped}"
        yield f"  groups: {fates_text(pipeline.groups, state=pipeline.state)}"
        yield f"  sequences: {fates_text(pipeline.sequences, state=pipeline.state)}"
        if pipeline.num_ignored:
            yield f"  events ignored, late or repeated: {pipeline.num_ignored}"
        if pipeline.failure:
            yield f"  reason: {pipeline.failure}"
    if status.num_dead_letters:
        yield (
            f"dead letters: {status.num_dead_letters} messages could not be read or handled;"
            " the logs name them"
        )
    yield f"run folder: {run_folder}"


def fates_text(counts: FateCounts, *, state: str) -> str:
    """``40 admitted = 32 trained + 8 in flight``, and whether that holds."""
    named = msgspec.to_builtins(counts)
    admitted = named.pop("admitted")
    parts = [f"{count} {name.replace('_', ' ')}" for name, count in named.items() if count]
    holds = conserved(counts) if state == "finished" else accounted_for(counts)
    balance = "" if holds else " (NOT CONSERVED)"
    return f"{admitted} admitted = {' + '.join(parts) or '0'}{balance}"
