"""The weight of tokens that another policy sampled than the one an update starts from (decoupled PPO).

Shape letters: N loss tokens in a flat list, B the sequences they belong to, one after the other.

Hilton et al. (arXiv:2110.00641) and AReaL (arXiv:2505.24298, its decoupled objective) split
pi / pi_behaviour into the ratio r = pi / pi_proximal, which is clipped, and w = pi_proximal /
pi_behaviour, which is not trained through and multiplies the policy loss:

    log w = clamp(logp_proximal - logp_behaviour, -20, 20)

- ``truncated_weights``      min(w, cap); at sequence level w is the product over the sequence's loss
  tokens, log of it clamped the same way (verl's ``rollout_corr_helper``; truncation: Espeholt et al.,
  IMPALA, arXiv:1802.01561)
- ``icepop_weights``         w where low <= w <= high, else 0 (Ling team, "Every Step Evolves",
  arXiv:2510.18855)
- ``sequence_mask_weights``  w, capped if a cap is given, where the gate lies within [low, high], else
  0; the gate is exp of the mean or the sum of log w over the sequence's loss tokens (SkyRL's geometric
  and product sequence masks; OpenRLHF's ``seq-mask-tis`` is the geometric gate without a cap)

What is masked stays in every denominator of the loss: counts are those before the filter, as in AReaL.

``loglinear_proximal`` saves the forward pass of the proximal policy (AReaL's
``compute_prox_logp_approximations``): with v_p = v_theta - 1 and v_b the version that sampled a token,

    logp_proximal = logp_b + alpha (logp_theta - logp_b)
    alpha = clamp((v_p - v_b) / (v_theta - v_b), 0, 1)

and alpha = 0 where v_b >= v_theta or the token was not generated (v_b < 0).

Deviations: v_theta is the version that the step makes, so that v_p is the policy at the start of the
step, which a forward pass would show (AReaL passes the version that the step starts from). A log-ratio
that is not finite makes the weight nan, and so refuses the step (AReaL sets it to 0). Weights are not
normalised over the batch. No KL-based metrics (AReaL's ``kl_k1`` to ``kl_k3``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jigsawrl.algorithms.losses import per_token, sequence_means, sequence_sums

MAX_LOG_WEIGHT = 20.0
"""verl's bound; exp(20) is far above any cap."""

Gate = Literal["geometric_mean", "product"]


@dataclass(frozen=True, kw_only=True)
class Correction:
    """What the policy loss of each token is multiplied by."""

    weights_N: Tensor
    """Detached; 0 where the token is left out."""
    bounded_N: Tensor
    """True where the token is left out or its weight was capped."""


def truncated_weights(
    proximal_N: Tensor,
    *,
    behaviour_N: Tensor,
    lengths_B: list[int],
    level: Literal["token", "sequence"],
    cap: float,
) -> Correction:
    """`proximal_N` and `behaviour_N` are log-probs [N]; sequence i has ``lengths_B[i]`` tokens."""
    log_weights = _log_weights(proximal_N, behaviour_N)
    if level == "sequence":
        sums_B = sequence_sums(log_weights, lengths_B=lengths_B)
        log_weights = per_token(_clamped(sums_B), lengths_B=lengths_B)
    weights = log_weights.exp()
    return Correction(weights_N=weights.clamp(max=cap), bounded_N=weights > cap)


def icepop_weights(
    proximal_N: Tensor, *, behaviour_N: Tensor, low: float, high: float
) -> Correction:
    """`proximal_N` and `behaviour_N` are log-probs [N]."""
    weights = _log_weights(proximal_N, behaviour_N).exp()
    masked = (weights < low) | (weights > high)  # False for nan, which must not vanish
    return Correction(weights_N=weights.masked_fill(masked, 0.0), bounded_N=masked)


def sequence_mask_weights(
    proximal_N: Tensor,
    *,
    behaviour_N: Tensor,
    lengths_B: list[int],
    gate: Gate,
    low: float,
    high: float,
    cap: float | None,
) -> Correction:
    """`proximal_N` and `behaviour_N` are log-probs [N]; sequence i has ``lengths_B[i]`` tokens."""
    log_weights = _log_weights(proximal_N, behaviour_N)
    combine = sequence_means if gate == "geometric_mean" else sequence_sums
    gates_B = _clamped(combine(log_weights, lengths_B=lengths_B)).exp()
    masked = per_token((gates_B < low) | (gates_B > high), lengths_B=lengths_B)
    weights = log_weights.exp()
    bounded = masked
    if cap is not None:
        bounded = masked | (weights > cap)
        weights = weights.clamp(max=cap)
    return Correction(weights_N=weights.masked_fill(masked, 0.0), bounded_N=bounded)


def loglinear_proximal(
    logprobs_N: Tensor, *, behaviour_N: Tensor, versions_N: Tensor, current_version: int
) -> Tensor:
    """Log-probs [N], detached; `versions_N` sampled the tokens, `current_version` is v_theta."""
    behaviour_versions = versions_N.to(logprobs_N.dtype)
    distance = current_version - behaviour_versions
    known = (distance > 0) & (versions_N >= 0)
    # distance 1 where it is not used: 0 / 0 would be nan.
    alpha = ((distance - 1) / torch.where(known, distance, 1)).clamp(0, 1)
    alpha = torch.where(known, alpha, 0)
    behaviour = behaviour_N.to(logprobs_N)
    return behaviour + alpha * (logprobs_N.detach() - behaviour)


def _log_weights(proximal_N: Tensor, behaviour_N: Tensor) -> Tensor:
    return _clamped(proximal_N.detach() - behaviour_N.detach().to(proximal_N))


def _clamped(log_weights: Tensor) -> Tensor:
    """Within +-20; what is not finite becomes nan rather than a plausible weight."""
    clamped = log_weights.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT)
    return torch.where(log_weights.isfinite(), clamped, torch.nan)
