"""How the losses of single tokens make the loss of an update: as weights, one per token.

Shape letters: B sequences, T tokens.

With mask m, n_i = sum_t m_it, N_tok = sum_i n_i, N_seq = the number of sequences with n_i > 0, n_p the
loss tokens of all sequences of prompt p, and N_prompt = the number of prompts with n_p > 0, all over
the *whole* update, and L a constant length:

- ``token_mean``               w_it = m_it / N_tok            (DAPO, arXiv:2503.14476, eq. 8)
- ``token_sum``                w_it = m_it
- ``seq_mean_token_sum``       w_it = m_it / N_seq
- ``seq_mean_token_sum_norm``  w_it = m_it / (L N_seq)        (Dr. GRPO, arXiv:2503.20783)
- ``seq_mean_token_mean``      w_it = m_it / (n_i N_seq)      (GRPO, arXiv:2402.03300, eq. 3)
- ``prompt_mean``              w_it = m_it / (n_p N_prompt)   (SkyRL)

The loss is ``sum_it w_it l_it``. Each micro-batch adds its own part of that sum, so neither the split
into micro-batches nor padding can change it. Names and formulas are verl's ``agg_loss``, the last is
SkyRL's ``prompt_mean``, the mean over prompts of their token means. Deviations:
no 1e-8 beside n_i (a sequence without loss tokens has no weight at all), and L is the configured
maximum of new tokens, as Dr. GRPO has it, not the width of a padded tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal[
    "token_mean",
    "token_sum",
    "seq_mean_token_sum",
    "seq_mean_token_sum_norm",
    "seq_mean_token_mean",
    "prompt_mean",
]


@dataclass(frozen=True, kw_only=True)
class Denominators:
    """Counts over all sequences of one update, whichever micro-batch or rank holds them, before any
    token is masked for its weight."""

    num_tokens: int
    """Loss tokens."""
    num_sequences: int
    """Sequences with at least one loss token."""
    num_prompts: int
    """Prompts with at least one loss token."""
    max_new_tokens: int
    """L: what a sum over tokens is divided by in ``seq_mean_token_sum_norm``."""


def token_weights(
    mask_BT: Tensor,
    *,
    aggregation: Aggregation,
    denominators: Denominators,
    prompt_tokens_B: Tensor | None = None,
) -> Tensor:
    """Weights [B, T] in float64; 0 where the mask is 0.

    `prompt_tokens_B` counts the loss tokens of the update that share the sequence's prompt;
    ``prompt_mean`` alone needs it."""
    mask = mask_BT.double()
    num_sequences = max(denominators.num_sequences, 1)
    if aggregation == "token_sum":
        return mask
    if aggregation == "token_mean":
        return mask / max(denominators.num_tokens, 1)
    if aggregation == "seq_mean_token_sum":
        return mask / num_sequences
    if aggregation == "seq_mean_token_sum_norm":
        return mask / (denominators.max_new_tokens * num_sequences)
    if aggregation == "seq_mean_token_mean":
        lengths_B1 = mask.sum(dim=-1, keepdim=True).clamp(min=1)
        return mask / (lengths_B1 * num_sequences)
    assert prompt_tokens_B is not None
    prompt_tokens_B1 = prompt_tokens_B.double().clamp(min=1)[:, None]
    return mask / (prompt_tokens_B1 * max(denominators.num_prompts, 1))


def weighted_sum(values: Tensor, *, weights: Tensor) -> Tensor:
    """``sum w v``; a token of weight 0 adds nothing, even where its value is not finite."""
    kept = weights != 0
    return torch.where(kept, values, 0).mul(weights.to(values.dtype)).sum()
