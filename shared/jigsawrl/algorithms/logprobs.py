"""Log-probabilities of chosen tokens under the distribution that they were sampled from.

Shape letters: N tokens in a flat list, V vocabulary, C tokens of one chunk.

    p = softmax(filter(logits / temperature))

``filter`` is the sampler's own: first top-k (the k largest logits and whatever ties with the k-th),
then top-p (the shortest prefix by falling probability whose mass reaches p), the rest gets
probability 0, and what remains is renormalised. Without it engine and trainer would speak of two
distributions (TRL issue 6789). The chosen token always stays: once the policy has moved, it may lie
outside the policy's new nucleus, where its log-probability would be minus infinity and its gradient
lost (the remedy of DeepSeek-V3.2, arXiv:2512.02556, is to keep the sampler's set;
ours needs no set in the record).

Values are computed in float32 at least, a chunk of tokens at a time, and recomputed in the backward
pass, so that no second [N, V] tensor beside the logits outlives its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**24
"""Logits of one chunk: 64 MiB in float32."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """The sampling settings that shape the distribution."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0


def selected_logprobs(
    logits_NV: Tensor,
    *,
    tokens_N: Tensor,
    sampling: Filter,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """(log-probs [N], entropies [N]) of the sampling distribution; entropies carry no gradient."""
    num_tokens, vocab_size = logits_NV.shape
    size = max(1, chunk_elements // vocab_size)
    if num_tokens <= size:
        return _chunk(logits_NV, tokens_N, sampling)
    parts = [
        checkpoint(_chunk, logits_CV, tokens_C, sampling, use_reentrant=False)
        for logits_CV, tokens_C in zip(logits_NV.split(size), tokens_N.split(size), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _chunk(logits_CV: Tensor, tokens_C: Tensor, sampling: Filter) -> tuple[Tensor, Tensor]:
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    scaled_CV = logits_CV / sampling.temperature
    removed_CV = _removed(scaled_CV.detach(), tokens_C, sampling)
    if removed_CV is not None:
        scaled_CV = scaled_CV.masked_fill(removed_CV, -torch.inf)
    logprobs_CV = scaled_CV.log_softmax(dim=-1)
    selected_C = logprobs_CV.gather(1, tokens_C[:, None]).squeeze(1)
    with torch.no_grad():
        # xlogy gives 0 for p = 0, where p log p would be nan.
        probabilities_CV = logprobs_CV.exp()
        entropy_C = -torch.special.xlogy(probabilities_CV, probabilities_CV).sum(dim=-1)
    return selected_C, entropy_C


def _removed(scaled_CV: Tensor, tokens_C: Tensor, sampling: Filter) -> Tensor | None:
    """True where the filter takes a token out; None where there is no filter."""
    if sampling.top_k is None and sampling.top_p >= 1:
        return None
    removed_CV = torch.zeros_like(scaled_CV, dtype=torch.bool)
    if sampling.top_k is not None and sampling.top_k < scaled_CV.shape[1]:
        kth_C1 = scaled_CV.topk(sampling.top_k, dim=-1).values[:, -1:]
        removed_CV = scaled_CV < kth_C1
    if sampling.top_p < 1:
        kept_CV = scaled_CV.masked_fill(removed_CV, -torch.inf)
        sorted_CV, order_CV = kept_CV.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        before_CV = sorted_CV.cumsum(dim=-1) - sorted_CV
        removed_CV = removed_CV | torch.zeros_like(removed_CV).scatter(
            1, order_CV, before_CV >= sampling.top_p
        )
    return removed_CV.scatter(1, tokens_C[:, None], False)
