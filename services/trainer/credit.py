"""From the rewards of a cut to an advantage per loss token, by the estimator of `jigsawrl.algorithms`
that the config names. Called by the step; knows nothing of models. PPO's advantages need values, so
they come from `critic`.

Shape letters: B sequences, N loss tokens of all samples in cut order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jigsawrl.algorithms.advantages import Normalization, group_advantages, whiten
from jigsawrl.algorithms.returns import discounted_returns
from jigsawrl.config_algorithm import (
    AlgorithmConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
)
from services.trainer.batch import Sample


def token_advantages(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[Tensor]:
    """Float64 advantages of the loss tokens of each sample; each rank computes those of all."""
    assert not isinstance(algorithm, PPOConfig)
    lengths = [sample.num_loss_tokens for sample in samples]
    if isinstance(algorithm, ReinforcePlusPlusConfig):
        returns = [
            discounted_returns(sample.reward, num_tokens=length, gamma=algorithm.gamma)
            for sample, length in zip(samples, lengths, strict=True)
        ]
        return _whitened(returns, lengths)
    advantages_B = group_advantages(
        torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
        groups_B=torch.tensor(group_numbers(samples)),
        normalization=_normalization(algorithm),
    )
    spread = [value.expand(length) for value, length in zip(advantages_B, lengths, strict=True)]
    if isinstance(algorithm, ReinforcePlusPlusBaselineConfig):
        return _whitened(spread, lengths)
    return spread


def group_numbers(samples: Sequence[Sample]) -> list[int]:
    """The number of each sample's group, from 0 in cut order."""
    numbers = {group: i for i, group in enumerate(dict.fromkeys(s.group for s in samples))}
    return [numbers[sample.group] for sample in samples]


def _normalization(algorithm: AlgorithmConfig) -> Normalization:
    if isinstance(algorithm, GRPOConfig):
        return algorithm.normalization
    if isinstance(algorithm, ReinforcePlusPlusBaselineConfig):
        return "mean_only"
    return "leave_one_out"


def _whitened(values: list[Tensor], lengths: list[int]) -> list[Tensor]:
    return list(torch.split(whiten(torch.cat(values)), lengths))
