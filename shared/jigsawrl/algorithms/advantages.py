"""Rewards to advantages: one number per sequence from the rewards of its group, whitening over a batch.

Shape letters: B sequences, N tokens in a flat list.

``group_advantages``, with R a reward and mean_g, std_g those of its group's n survivors:

- ``group_std``      (R - mean_g) / (std_g + 1e-6)    GRPO: Shao et al., DeepSeekMath
  (arXiv:2402.03300), section 4.1.2; epsilon and unbiased deviation are verl's
  ``compute_grpo_outcome_advantage``
- ``batch_std``      (R - mean_g) / (std of all rewards + 1e-6)    TRL's ``scale_rewards="batch"``
- ``mean_only``      R - mean_g    Dr. GRPO: Liu et al. (arXiv:2503.20783), section 3.2; also what
  REINFORCE++-baseline (Hu et al., arXiv:2501.03262) whitens
- ``leave_one_out``  R - mean of the others = (R - mean_g) n / (n - 1)    RLOO: Ahmadian et al.
  (arXiv:2402.14740); verl's ``compute_rloo_outcome_advantage``

``whiten``: (x - mean) * rsqrt(var + 1e-8) over all loss tokens of the batch, unbiased variance (verl's
``masked_whiten``).

Deviations: a group of one gets 0 (verl: its raw reward, which would push up whatever was sampled); a
group in which all rewards are equal gets exactly 0, whatever rounding leaves of R - mean; so does a
batch of equal values when it is whitened. A group that is whitened afterwards enters with that 0 and
leaves with (0 - mean) / std of the batch, as the formula has it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Normalization = Literal["group_std", "batch_std", "mean_only", "leave_one_out"]

STD_EPSILON = 1e-6
"""Added to the deviation that rewards are divided by; verl's value."""
VARIANCE_EPSILON = 1e-8
"""Added to the variance in `whiten`; verl's value."""


def group_advantages(
    rewards_B: Tensor, *, groups_B: Tensor, normalization: Normalization
) -> Tensor:
    """Advantages [B] in float64 for `rewards_B`, where ``groups_B[i]`` numbers the group of i.

    Groups may differ in size: those who lost samples are normalised over their survivors."""
    rewards = rewards_B.double()
    advantages = torch.zeros_like(rewards)
    batch_std = _unbiased_std(rewards)
    for group in torch.unique(groups_B):
        members = groups_B == group
        own = rewards[members]
        if own.max() == own.min():
            continue  # a single sample, or nothing to prefer: 0
        centred = own - own.mean()
        if normalization == "group_std":
            centred = centred / (_unbiased_std(own) + STD_EPSILON)
        elif normalization == "batch_std":
            centred = centred / (batch_std + STD_EPSILON)
        elif normalization == "leave_one_out":
            centred = centred * (len(own) / (len(own) - 1))
        advantages[members] = centred
    return advantages


def whiten(
    values_N: Tensor,
    *,
    sum_over_ranks: Callable[[Tensor], Tensor] = lambda values: values,
    max_over_ranks: Callable[[Tensor], Tensor] = lambda values: values,
) -> Tensor:
    """`values_N` (float64 [N], this rank's) with mean 0 and variance 1 over the batch of all ranks.

    The two functions reduce small float64 tensors; without them this rank's values are the batch."""
    count = values_N.new_tensor([float(len(values_N))])
    total = sum_over_ranks(torch.cat([count, values_N.sum()[None]]))
    ends = values_N.new_full((2,), -torch.inf)
    if len(values_N):
        ends = torch.stack([values_N.max(), -values_N.min()])
    largest, smallest = max_over_ranks(ends)
    if largest == -smallest or total[0] < 2:
        return torch.zeros_like(values_N)
    centred = values_N - total[1] / total[0]
    # A second pass: a difference of sums would lose the digits that a small variance needs.
    squares = sum_over_ranks(centred.square().sum()[None])
    return centred * torch.rsqrt(squares / (total[0] - 1) + VARIANCE_EPSILON)


def _unbiased_std(values: Tensor) -> Tensor:
    """0 for a single value, for which torch gives nan."""
    return values.std() if len(values) > 1 else values.new_zeros(())
