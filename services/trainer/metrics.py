"""The numbers of a step that come from its samples and its cut, rather than from its loss."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from jigsawrl.contract.commands import BatchCut
from services.trainer.batch import Sample


def batch_metrics(samples: Sequence[Sample], *, cut: BatchCut, train_s: float) -> dict[str, float]:
    """Reward, lengths, staleness, throughput and sub-stages.

    Staleness of a sequence, in versions before the one that the step starts from: in total that of
    its oldest token; in flight what passed between its oldest and its newest; in queue the rest."""
    rewards = [sample.reward for sample in samples]
    lengths = [int((sample.versions >= 0).sum()) for sample in samples]
    oldest = [_versions(sample, cut.version)[0] for sample in samples]
    newest = [_versions(sample, cut.version)[1] for sample in samples]
    step_s = cut.rollout_s + train_s
    metrics = {
        "reward_mean": statistics.fmean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "num_groups": float(len(cut.groups)),
        "num_sequences": float(len(samples)),
        "generated_tokens": float(sum(lengths)),
        "mean_length_tokens": statistics.fmean(lengths),
        "staleness_total_mean": statistics.fmean(cut.version - version for version in oldest),
        "staleness_total_max": float(max(cut.version - version for version in oldest)),
        "staleness_in_flight_mean": statistics.fmean(
            new - old for old, new in zip(oldest, newest, strict=True)
        ),
        "staleness_in_queue_mean": statistics.fmean(cut.version - version for version in newest),
        "rollout_s": cut.rollout_s,
        "train_s": train_s,
        "tokens_per_s": sum(lengths) / step_s if step_s > 0 else 0.0,
    }
    for kind, (seconds, share) in sorted(cut.substages.items()):
        metrics[f"substage_{kind}_s"] = seconds
        metrics[f"substage_{kind}_share"] = share
    return metrics


def penalty_mean(samples: Sequence[Sample], shaped: Sequence[Sample]) -> float:
    """What shaping added to the rewards, on average: at most 0."""
    return statistics.fmean(
        after.reward - before.reward for before, after in zip(samples, shaped, strict=True)
    )


def _versions(sample: Sample, version: int) -> tuple[int, int]:
    """(oldest, newest) version among generated tokens; a sequence without any is not stale."""
    generated = sample.versions[sample.versions >= 0]
    if not len(generated):
        return version, version
    return int(generated.min()), int(generated.max())
