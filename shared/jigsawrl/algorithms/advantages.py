"""Group-relative advantages (GRPO): one number per sequence from the rewards of its group.

Shape letters: B sequences.

Shao et al., DeepSeekMath (arXiv:2402.03300), eq. of section 4.1.2: ``A = (R - mean_g) / std_g``;
``mean_only`` is Dr. GRPO (Liu et al., arXiv:2503.20783, section 3.2); the epsilon and the unbiased
deviation are those of verl's ``compute_grpo_outcome_advantage``; ``batch_std`` divides by the
deviation of all rewards of the batch (TRL's ``scale_rewards="batch"``).

Deviations: a group of one gets 0 (verl: its raw reward, which would push up whatever was sampled); a
group in which all rewards are equal gets exactly 0, whatever rounding leaves of R - mean.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Normalization = Literal["group_std", "batch_std", "mean_only"]

STD_EPSILON = 1e-6
"""Added to the deviation that rewards are divided by; verl's value."""


def group_advantages(
    rewards_B: Tensor, *, groups_B: Tensor, normalization: Normalization
) -> Tensor:
    """Advantages [B] in float64 for `rewards_B`, where ``groups_B[i]`` numbers the group of i.

    Groups may differ in size: those who lost samples are normalised over their survivors."""
    rewards = rewards_B.double()
    advantages = torch.zeros_like(rewards)
    batch_std = _unbiased_std(rewards)
    for group in groups_B.unique():
        members = groups_B == group
        own = rewards[members]
        if own.max() == own.min():
            continue  # a single sample, or nothing to prefer: 0
        centred = own - own.mean()
        if normalization == "group_std":
            centred = centred / (_unbiased_std(own) + STD_EPSILON)
        elif normalization == "batch_std":
            centred = centred / (batch_std + STD_EPSILON)
        advantages[members] = centred
    return advantages


def _unbiased_std(values: Tensor) -> Tensor:
    """0 for a single value, for which torch gives nan."""
    return values.std() if len(values) > 1 else values.new_zeros(())
