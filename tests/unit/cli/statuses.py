"""Statuses as the scheduler would answer them."""

from __future__ import annotations

from typing import Any

from jigsawrl.contract.requests import (
    Activity,
    EvaluationResult,
    FateCounts,
    PipelineStatus,
    Status,
    WorkerStatus,
)

PIPELINE: dict[str, Any] = {
    "pipeline": "tiny",
    "state": "running",
    "version": 0,
    "incarnation": 0,
    "num_steps": 3,
    "groups": FateCounts(),
    "sequences": FateCounts(),
    "evaluations": (),
    "num_evaluations_skipped": 0,
    "metrics": {},
    "num_trained_tokens": 0,
    "running_s": 0.0,
    "waiting_for": (),
    "workers": (),
    "failure": None,
}


def status(num_dead_letters: int = 0, **changes: Any) -> Status:
    """One pipeline named ``tiny`` of 3 steps, running unless `changes` say otherwise."""
    return Status(
        id="status:1",
        leader="scheduler",
        leader_epoch=1,
        stream_sequence=9,
        num_dead_letters=num_dead_letters,
        pipelines=(PipelineStatus(**(PIPELINE | changes)),),
    )


FINISHED: dict[str, Any] = {
    "state": "finished",
    "version": 3,
    "groups": FateCounts(admitted=7, trained=6, failed=1),
    "sequences": FateCounts(admitted=28, trained=24, failed=4),
    "evaluations": (
        EvaluationResult(version=0, accuracy=0.5, num_problems=8, mean_reward=0.5),
        EvaluationResult(version=3, accuracy=0.75, num_problems=8, mean_reward=0.75),
    ),
    "num_trained_tokens": 1000,
    "running_s": 4.0,
    "workers": (
        WorkerStatus(
            worker="tiny.rollout0",
            role="rollout",
            device="node0/cpu0",
            state="ready",
            version=3,
            num_held=0,
        ),
    ),
}


def activity(num_done: int) -> Activity:
    """The trainer's warm-up."""
    return Activity(
        id=f"activity:{num_done}",
        pipeline="tiny",
        worker="tiny.trainer0",
        activity="warm-up",
        num_done=num_done,
        num_total=4000,
        detail="accuracy 0.31",
    )
