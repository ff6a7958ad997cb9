"""The policy loss and the correction of `jigsawrl.algorithms` that the config names, for the loss
tokens of one micro-batch. Called by the step; knows nothing of models.

Shape letters: N loss tokens of a micro-batch, row-major, B its sequences.
"""

from __future__ import annotations

from torch import Tensor

from jigsawrl.algorithms.correction import (
    Correction,
    icepop_weights,
    sequence_mask_weights,
    truncated_weights,
)
from jigsawrl.algorithms.losses import (
    Surrogate,
    clipped_surrogate,
    sequence_surrogate,
    weighted_reinforce,
)
from jigsawrl.config_algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    GSPOConfig,
    IcePopConfig,
    TruncateConfig,
)


def policy_loss(
    algorithm: AlgorithmConfig,
    logprobs_N: Tensor,
    *,
    proximal_N: Tensor,
    advantages_N: Tensor,
    lengths_B: list[int],
) -> Surrogate:
    """The loss per token, before correction and aggregation; gradients through `logprobs_N` only."""
    loss = algorithm.loss
    if isinstance(loss, GSPOConfig):
        return sequence_surrogate(
            logprobs_N,
            proximal_N=proximal_N,
            advantages_N=advantages_N,
            lengths_B=lengths_B,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
        )
    if isinstance(loss, CISPOConfig):
        return weighted_reinforce(
            logprobs_N,
            proximal_N=proximal_N,
            advantages_N=advantages_N,
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
        )
    return clipped_surrogate(
        logprobs_N,
        proximal_N=proximal_N,
        advantages_N=advantages_N,
        clip_low=loss.clip_low,
        clip_high=loss.clip_high,
        dual_clip=loss.dual_clip,
    )


def behaviour_correction(
    algorithm: AlgorithmConfig, *, proximal_N: Tensor, behaviour_N: Tensor, lengths_B: list[int]
) -> Correction | None:
    """What multiplies the policy loss of each token; None where the config has no correction."""
    correction = algorithm.correction
    if correction is None:
        return None
    if isinstance(correction, TruncateConfig):
        return truncated_weights(
            proximal_N,
            behaviour_N=behaviour_N,
            lengths_B=lengths_B,
            level=correction.level,
            cap=correction.cap,
        )
    if isinstance(correction, IcePopConfig):
        return icepop_weights(
            proximal_N, behaviour_N=behaviour_N, low=correction.low, high=correction.high
        )
    return sequence_mask_weights(
        proximal_N,
        behaviour_N=behaviour_N,
        lengths_B=lengths_B,
        gate=correction.gate,
        low=correction.low,
        high=correction.high,
        cap=correction.cap,
    )
