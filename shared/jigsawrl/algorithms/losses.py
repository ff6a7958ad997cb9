"""The clipped surrogate of PPO, per token.

Shape letters: N tokens (any shape works: everything here is elementwise).

Schulman et al. (arXiv:1707.06347), eq. 7, with the two-sided clip of DAPO ("clip-higher",
arXiv:2503.14476, eq. 10):

    r = exp(clamp(logp - logp_proximal, -20, 20))
    l = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))

The clamp of the log-ratio is verl's ``compute_policy_loss_vanilla``. Deviation: no dual clip (verl's
``clip_ratio_c``), which neither paper has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is far outside any clip range and far inside float32: overflow can't reach the loss."""


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Loss per token and what the clip did to it."""

    loss_N: Tensor
    clipped_N: Tensor
    """True where the clipped term is the larger one, so that the token's gradient is 0."""
    ratio_N: Tensor
    """Detached."""


def clipped_surrogate(
    logprobs_N: Tensor,
    *,
    proximal_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Gradients flow through `logprobs_N` only."""
    log_ratio = (logprobs_N - proximal_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = log_ratio.exp()
    unclipped = -advantages_N * ratio
    clipped = -advantages_N * ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        loss_N=torch.maximum(unclipped, clipped),
        clipped_N=(clipped > unclipped).detach(),
        ratio_N=ratio.detach(),
    )
