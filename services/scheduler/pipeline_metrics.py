"""Metrics of nodes and pipelines, read from the scheduler's state at the moment they are asked for."""

from __future__ import annotations

from collections import Counter
from typing import get_args

from jigsawrl.core.group import SequenceStage
from jigsawrl.core.state import FATES, Pipeline, PipelineStage, State
from jigsawrl.core.status import in_flight, loads
from jigsawrl.metrics import (
    CHECKPOINT_VERSION,
    EVALUATION_ACCURACY,
    EVALUATION_VERSION,
    EVALUATIONS_SKIPPED,
    EVENTS_IGNORED,
    GROUPS,
    GROUPS_ADMITTED,
    GROUPS_IN_FLIGHT,
    MIGRATED_TOKENS,
    MIGRATIONS,
    NODE_UP,
    PIPELINE_INCARNATION,
    PIPELINE_PAUSED,
    PIPELINE_STATE,
    PIPELINE_STEPS,
    PIPELINE_VERSION,
    REWARD_MEAN,
    REWARD_STD,
    SEQUENCES,
    SEQUENCES_IN_FLIGHT,
    SHARE_APPLIED,
    SHARE_WANTED,
    STALENESS,
    STALENESS_MAX,
    TOKENS_AGAIN,
    TOKENS_PER_SECOND,
    TRAINED_TOKENS,
    WORK_WAITING,
    WORKER_HELD,
    WORKER_READY,
    Metric,
)
from services.exposition import Families

STATES: tuple[PipelineStage, ...] = get_args(PipelineStage)
STAGES: tuple[SequenceStage, ...] = get_args(SequenceStage)

STALENESS_PARTS = ("total", "in_flight", "in_queue")

_OF_STEP: dict[Metric, str] = {
    REWARD_MEAN: "reward_mean",
    REWARD_STD: "reward_std",
    STALENESS_MAX: "staleness_total_max",
    TOKENS_PER_SECOND: "tokens_per_s",
}
"""Keys of the trainer's metrics."""


def add_cluster(families: Families, state: State) -> None:
    """What belongs to no pipeline."""
    families.add(EVENTS_IGNORED, state.num_ignored)
    for node in state.nodes.values():
        said = state.introductions.get(node.id)
        if node.up or said is None or not said.left:  # who leaves on purpose is not lost
            families.add(NODE_UP, node.up, node.id)


def add_pipeline(families: Families, pipeline: Pipeline) -> None:
    """All of one that lives; of one that has ended what it reached."""
    _add_progress(families, pipeline)
    if pipeline.live:
        _add_step(families, pipeline)
        _add_work(families, pipeline)
        _add_workers(families, pipeline)


def _add_progress(families: Families, pipeline: Pipeline) -> None:
    name = pipeline.name
    for state in STATES:
        families.add(PIPELINE_STATE, state == pipeline.stage, name, state)
    families.add(PIPELINE_VERSION, pipeline.version or 0, name)
    families.add(PIPELINE_STEPS, pipeline.spec.num_steps, name)
    families.add(TRAINED_TOKENS, pipeline.num_trained_tokens, name)
    families.add(CHECKPOINT_VERSION, pipeline.checkpoint_version, name)
    if pipeline.evaluations:
        families.add(EVALUATION_ACCURACY, pipeline.evaluations[-1].accuracy, name)
        families.add(EVALUATION_VERSION, pipeline.evaluations[-1].version, name)


def _add_step(families: Families, pipeline: Pipeline) -> None:
    name, metrics = pipeline.name, pipeline.metrics
    families.add(PIPELINE_PAUSED, pipeline.paused, name)
    families.add(PIPELINE_INCARNATION, pipeline.incarnation, name)
    for metric, key in _OF_STEP.items():
        families.add(metric, metrics.get(key), name)
    for part in STALENESS_PARTS:
        families.add(STALENESS, metrics.get(f"staleness_{part}_mean"), name, part)
    families.add(MIGRATIONS, pipeline.num_migrations, name)
    families.add(MIGRATED_TOKENS, pipeline.num_migrated_tokens, name)
    families.add(TOKENS_AGAIN, pipeline.num_tokens_again, name)
    families.add(EVALUATIONS_SKIPPED, len(pipeline.evaluations_skipped), name)


def _add_work(families: Families, pipeline: Pipeline) -> None:
    name, groups = pipeline.name, in_flight(pipeline)
    families.add(GROUPS_ADMITTED, pipeline.num_admitted, name)
    families.add(GROUPS_IN_FLIGHT, len(groups), name)
    for fate in FATES:
        families.add(GROUPS, len(pipeline.group_fates[fate]), name, fate)
        families.add(SEQUENCES, len(pipeline.sequence_fates[fate]), name, fate)
    stages = Counter(sequence.stage for group in groups for sequence in group.sequences)
    for stage in STAGES:
        families.add(SEQUENCES_IN_FLIGHT, stages[stage], name, stage)
    waiting = {
        "prompt": len(pipeline.to_make),
        "generation": pipeline.num_waiting,
        "score": len(pipeline.to_score),
    }
    for work, num in waiting.items():
        families.add(WORK_WAITING, num, name, work)


def _add_workers(families: Families, pipeline: Pipeline) -> None:
    held = loads(pipeline)
    for tenant in pipeline.tenants.values():
        labels = (pipeline.name, tenant.role, tenant.id, tenant.device or "")
        families.add(WORKER_READY, tenant.usable, *labels)
        families.add(WORKER_HELD, held[tenant.id], *labels)
        families.add(SHARE_WANTED, tenant.share, *labels)
        families.add(SHARE_APPLIED, tenant.applied_share, *labels)
