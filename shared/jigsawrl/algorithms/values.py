"""The critic's loss per token.

Shape letters: N loss tokens in a flat list.

    l = max((V - G)^2, (V_old + clamp(V - V_old, -clip, clip) - G)^2) / 2

with G the return and V_old the value at the start of the step: PPO's reference code
(openai/baselines ``ppo2``), and verl, OpenRLHF and AReaL.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """Loss per token, and where the clip holds it."""

    loss_N: Tensor
    clipped_N: Tensor
    """True where the clipped error is the larger one, so that the token's gradient is 0."""


def clipped_value_loss(
    values_N: Tensor, *, old_values_N: Tensor, returns_N: Tensor, clip: float
) -> ValueLoss:
    """Gradients flow through `values_N` only. All tensors [N], of one floating dtype."""
    old = old_values_N.detach()
    near = old + (values_N - old).clamp(-clip, clip)
    error = (values_N - returns_N.detach()).square()
    near_error = (near - returns_N.detach()).square()
    return ValueLoss(
        loss_N=torch.maximum(error, near_error) / 2, clipped_N=(near_error > error).detach()
    )
