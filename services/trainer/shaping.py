"""From stored records to the samples that a step trains; the trainer tenant calls it, in its thread."""

from __future__ import annotations

from collections.abc import Sequence

from jigsawrl.config import PipelineConfig
from services.trainer.batch import Loaded, Sample, make_sample, permute_rewards, shape_rewards
from services.trainer.metrics import penalty_mean


def samples_of(
    records: Sequence[Loaded], config: PipelineConfig, *, version: int
) -> tuple[list[Sample], dict[str, float]]:
    """The samples as they are trained, and metrics of what was done to their rewards."""
    samples = [make_sample(*record) for record in records]
    shaping: dict[str, float] = {}
    overlong = config.algorithm.overlong
    if overlong is not None:
        raw, limit = samples, config.rollout.sampling.max_new_tokens
        samples = shape_rewards(raw, overlong, max_new_tokens=limit)
        shaping["overlong_penalty_mean"] = penalty_mean(raw, samples)
    if config.trainer.control == "permuted_rewards":
        samples = permute_rewards(samples, seed=config.seed, version=version)
    return samples, shaping
