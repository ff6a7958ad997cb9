"""Estimators of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html), per token.

Shape letters: N tokens (elementwise).

With d = logp - logp_reference:

- ``k1``  d                     unbiased; d's gradient is the score, whose mean is 0: no penalty in
                                expectation when it is added to a loss, only noise
- ``k2``  d^2 / 2               biased value; its gradient d * score is that of the KL divergence
- ``k3``  exp(-d) + d - 1       unbiased, never negative; GRPO's choice (arXiv:2402.03300, eq. 4)

Each is differentiated as written, through `logprobs_N` alone (verl's plain names; its "+" variants,
value of one estimator with the gradient of k2, do not exist here). As in verl's ``kl_penalty``, -d is
clamped to +-20 in k3 and k3 itself to +-10; outside, its gradient is 0.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0


def kl_estimate(logprobs_N: Tensor, *, reference_N: Tensor, estimator: Estimator) -> Tensor:
    """The estimate per token."""
    difference = logprobs_N - reference_N.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    negative = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (negative.exp() - negative - 1).clamp(-MAX_K3, MAX_K3)
