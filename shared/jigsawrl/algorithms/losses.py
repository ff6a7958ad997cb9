"""Policy losses per token: three ways to bound how far an update may move the policy.

Shape letters: N loss tokens in a flat list, B the sequences they belong to, one after the other.

With r = exp(clamp(logp - logp_proximal, -20, 20)), A the advantage, and ``clip`` to
[1 - clip_low, 1 + clip_high]:

- ``clipped_surrogate``  l = max(-A r, -A clip(r))    PPO: Schulman et al. (arXiv:1707.06347), eq. 7,
  with DAPO's two bounds ("clip-higher", arXiv:2503.14476, eq. 10); where A < 0 and a dual clip c > 1 is
  given, l = min(l, -c A) (Ye et al., arXiv:1912.09729)
- ``sequence_surrogate`` the same with r_t = sg(s) exp(logp_t - sg(logp_t)), s = exp(mean_t(logp_t -
  logp_proximal_t)) over the loss tokens of the sequence    GSPO: Zheng et al. (arXiv:2507.18071), in
  its token form, as verl has it
- ``weighted_reinforce`` l = -sg(clip(r)) A logp    CISPO: MiniMax-M1 (arXiv:2506.13585), section 3.1

The clamp of the log-ratio is verl's ``compute_policy_loss_vanilla``, and at most 10 for a sequence, as
in its GSPO. Deviation: CISPO's bounds are relative to 1 on both sides, as in verl, slime and AReaL
(TRL's upper bound is the ratio itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is far outside any clip range and far inside float32: overflow can't reach the loss."""
MAX_SEQUENCE_LOG_RATIO = 10.0
"""verl's bound for GSPO, whose ratio is a geometric mean."""


@dataclass(frozen=True, kw_only=True)
class Surrogate:
    """Loss per token and what the clip did to it."""

    loss_N: Tensor
    clipped_N: Tensor
    """True where a bound decides: in a surrogate that token's gradient is 0."""
    ratio_N: Tensor
    """Detached, before any clip."""


def clipped_surrogate(
    logprobs_N: Tensor,
    *,
    proximal_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Surrogate:
    """Gradients flow through `logprobs_N` only. All tensors [N], of one floating dtype."""
    ratio = _log_ratio(logprobs_N, proximal_N).exp()
    return _surrogate(ratio, advantages_N, clip_low, clip_high, dual_clip)


def sequence_surrogate(
    logprobs_N: Tensor,
    *,
    proximal_N: Tensor,
    advantages_N: Tensor,
    lengths_B: list[int],
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """As `clipped_surrogate`, one ratio for the ``lengths_B[i]`` tokens of sequence i."""
    detached_N = logprobs_N.detach()
    means_B = sequence_means(detached_N - proximal_N.detach(), lengths_B=lengths_B)
    log_ratio = per_token(means_B, lengths_B=lengths_B) + (logprobs_N - detached_N)
    ratio = log_ratio.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    return _surrogate(ratio, advantages_N, clip_low, clip_high, None)


def weighted_reinforce(
    logprobs_N: Tensor,
    *,
    proximal_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
) -> Surrogate:
    """Gradients flow through `logprobs_N` only, at every token. All tensors [N]."""
    ratio = _log_ratio(logprobs_N.detach(), proximal_N).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(
        loss_N=-weight * advantages_N * logprobs_N, clipped_N=weight != ratio, ratio_N=ratio
    )


def sequence_means(values_N: Tensor, *, lengths_B: list[int]) -> Tensor:
    """The mean [B] over the tokens of each sequence; 0 for one without any."""
    return sequence_sums(values_N, lengths_B=lengths_B) / values_N.new_tensor(
        [max(length, 1) for length in lengths_B]
    )


def sequence_sums(values_N: Tensor, *, lengths_B: list[int]) -> Tensor:
    """The sum [B] over the tokens of each sequence."""
    if not lengths_B:
        return values_N.new_zeros(0)
    # Part by part, not index_add: that adds in no fixed order on CUDA.
    return torch.stack([part.sum() for part in torch.split(values_N, lengths_B)])


def per_token(values_B: Tensor, *, lengths_B: list[int]) -> Tensor:
    """The value of each sequence at each of its tokens [N]."""
    return values_B.repeat_interleave(torch.tensor(lengths_B, dtype=torch.long).to(values_B.device))


def _log_ratio(logprobs_N: Tensor, proximal_N: Tensor) -> Tensor:
    return (logprobs_N - proximal_N.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _surrogate(
    ratio_N: Tensor,
    advantages_N: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> Surrogate:
    unclipped = -advantages_N * ratio_N
    bounded = -advantages_N * ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(unclipped, bounded)
    clipped = bounded > unclipped
    if dual_clip is not None:
        ceiling = -dual_clip * advantages_N
        too_large = (advantages_N < 0) & (loss > ceiling)
        loss = torch.where(too_large, ceiling, loss)
        clipped = clipped | too_large
    return Surrogate(loss_N=loss, clipped_N=clipped.detach(), ratio_N=ratio_N.detach())
