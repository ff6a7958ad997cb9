"""Drawing tokens: temperature, top-k and top-p, log-probs, and random numbers by counter.

Called by `torch_engine`. The rule that makes log-probs honest: a token's log-prob is that of the
distribution it was drawn from - after temperature, top-k and top-p, renormalised over what they
keep. A trainer that compares its own log-probs with these must apply the same temperature and the
same filter; otherwise the ratio is biased (huggingface/trl#6789, #4159).

Order as in transformers and vLLM: temperature, top-k, top-p. Ties at the k-th logit are all kept.

Letters: N sequences · V vocabulary · T positions.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    max_new_tokens: int
    greedy: bool = False
    """Take the most likely token; its log-prob is that of the unfiltered distribution."""


def _signed(value: int) -> int:
    """64 bits as the signed number that torch stores."""
    return (value & (2**64 - 1)) - (2**64 if value & 2**63 else 0)


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX_1 = _signed(0xBF58476D1CE4E5B9)
_MIX_2 = _signed(0x94D049BB133111EB)


def uniforms(seeds: list[int], positions_NT: Tensor) -> Tensor:
    """[N, T] float64 in [0, 1): the draw of each sequence at each position, and of nothing else.

    Counter-based: output `position` of splitmix64 (Steele, Lea, Flood 2014; constants of Vigna's
    splitmix64.c) seeded by the mixed seed. The seed is mixed once more than there, because
    neighbouring seeds would give shifted copies of one stream. 52 bits are used, so that
    ``u * total < total`` holds after rounding and no draw falls off the end of a distribution."""
    signed = [_signed(seed) for seed in seeds]
    seeds_N1 = torch.tensor(signed, dtype=torch.int64, device=positions_NT.device)[:, None]
    bits_NT = _mix(_mix(seeds_N1) + (positions_NT.long() + 1) * _GOLDEN)
    return _shift_right(bits_NT, 12).double() * 2.0**-52


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # torch shifts signed numbers arithmetically; the mask clears the copies of the sign bit.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def draw(logits_NV: Tensor, uniforms_N: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens [N] and their log-probs [N], by inverting the cumulative distribution.

    `logits_NV` is float32."""
    if sampling.greedy:
        tokens_N = logits_NV.argmax(-1)
        logprobs_NV = logits_NV.log_softmax(-1)
    else:
        logprobs_NV = filtered(logits_NV, sampling).log_softmax(-1)
        # In float64, since float32 sums over a large vocabulary lose the rare tokens.
        cumulative_NV = logprobs_NV.double().exp().cumsum(-1)
        target_N = uniforms_N * cumulative_NV[:, -1]
        tokens_N = torch.searchsorted(cumulative_NV, target_N[:, None], right=True)[:, 0]
    return tokens_N, logprobs_NV.gather(1, tokens_N[:, None])[:, 0]


def filtered(logits_NV: Tensor, sampling: Sampling) -> Tensor:
    """Logits with the temperature applied, and minus infinity for what top-k and top-p leave out."""
    if sampling.temperature != 1.0:
        logits_NV = logits_NV / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < logits_NV.shape[1]:
        smallest_N1 = logits_NV.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, -torch.inf)
    if sampling.top_p < 1.0:
        sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
        probs_NV = sorted_NV.softmax(-1)
        # Left out where the more likely tokens already reach top_p; so the first always stays.
        out_NV = probs_NV.cumsum(-1) - probs_NV >= sampling.top_p
        out_NV = torch.zeros_like(out_NV).scatter(1, order_NV, out_NV)
        logits_NV = logits_NV.masked_fill(out_NV, -torch.inf)
    return logits_NV
