"""Finds out which numbers of rows give equal bits, with the loaded model on this machine.

Called by `torch_engine` once per model shape, before the first deterministic token. Libraries choose
kernels by shape, so what holds for one model on one CPU need not hold on another. The first two
layers and the output head are run on the same rows in every size of `invariant.SIZES`, in other
company and in other places, and a size is used only if it gives the bits of the largest. Kernels
do not look at the numbers, so one trial of a shape tells about all of its runs. Where not even one
size agrees with itself, or where spans or prefill show in the bits, the model is refused.

What is tried: all sizes at one span; all spans up to `MOST_TOKENS` at the smallest size; a prefill
of three prompts of up to `PROMPT_TOKENS`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.rollout.engine.cache import SlotCache
from services.rollout.engine.invariant import SPAN_TOKENS, InvariantDecoder
from services.rollout.engine.sampling import Sampling, draw

NUM_PATTERNS = 8
"""Different contents of the cache that the trials use."""
MOST_TOKENS = 1024
PROMPT_TOKENS = 72
"""Three pieces of a prompt, of which the last is shorter."""


class DisagreementError(ValueError):
    """This model can't be run deterministically here; the message says why."""


class Trial:
    """The rows that are run in all sizes and spans: tokens, positions and what lies before them."""

    def __init__(self, decoder: InvariantDecoder, sampling: Sampling) -> None:
        self._decoder = decoder.beginning(num_layers=2)
        self._sampling = sampling
        self._device, self._dtype = decoder.device, decoder.dtype
        self._random = torch.Generator().manual_seed(0)
        self.num_rows = decoder.sizes[-1]
        self.span = _capacity(min(MOST_TOKENS, decoder.max_positions))
        self._tokens = self._integers(decoder.vocab_size, self.num_rows)
        self._draws = torch.rand(self.num_rows, dtype=torch.float64, generator=self._random)
        shape = (NUM_PATTERNS, decoder.num_kv_heads, self.span, decoder.head_dim)
        self._keys = torch.randn(shape, generator=self._random).to(self._device, self._dtype)
        self._values = torch.randn(shape, generator=self._random).to(self._device, self._dtype)

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._random)

    def permuted(self, size: int) -> Tensor:
        """Some of the rows, in any order."""
        return torch.randperm(self.num_rows, generator=self._random)[:size]

    def cache(self, *, num_slots: int, span: int) -> SlotCache:
        """An empty cache."""
        cache = SlotCache(
            num_layers=self._decoder.num_layers,
            num_kv_heads=self._decoder.num_kv_heads,
            head_dim=self._decoder.head_dim,
            device=self._device,
            dtype=self._dtype,
        )
        cache.grow(num_slots=num_slots, capacity_tokens=span)
        return cache

    def use(self, sizes: tuple[int, ...]) -> None:
        """Go on with these sizes only."""
        self._decoder.sizes = sizes

    def outputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Logits [N, V], tokens [N] and log-probs [N] of rows at positions of the first span."""
        positions = (rows % SPAN_TOKENS).clamp(max=self._decoder.max_positions - 1)
        logits = self._decoder.logits(self.hidden(rows, positions, span=SPAN_TOKENS))
        return (logits, *draw(logits, self._draws[rows].to(self._device), self._sampling))

    def hidden(self, rows: Tensor, positions: Tensor, *, span: int) -> Tensor:
        """What rows at some positions give to the output head, [N, E]."""
        cache = self.cache(num_slots=len(rows), span=span)
        patterns, slots = rows % NUM_PATTERNS, torch.arange(len(rows))
        for layer in range(self._decoder.num_layers):
            keys, values = (part[patterns, :, :span] for part in (self._keys, self._values))
            cache.fill(layer, keys, values, slots.to(self._device))
        tokens, positions = self._tokens[rows].to(self._device), positions.to(self._device)
        return self._decoder.hidden(tokens, positions, cache, span=span, first_slot=0)

    def spans_agree(self, size: int) -> bool:
        """Rows at several positions, each time in all spans that hold them."""
        rows = torch.arange(size)
        most = self._decoder.max_positions - 1
        for last in range(SPAN_TOKENS - 1, self.span, 7 * SPAN_TOKENS):
            positions = (last - 11 * rows).clamp(min=0, max=most)
            spans = range(last + 1, self.span + 1, SPAN_TOKENS)
            expected, *others = (self.hidden(rows, positions, span=span) for span in spans)
            if not all(_equal(other, expected) for other in others):
                return False
        return True

    def prefill_writes_what_decoding_writes(self, size: int) -> bool:
        """Three prompts at once, and the same ones token by token."""
        num_tokens = min(PROMPT_TOKENS, self._decoder.max_positions)
        prompts = self._integers(self._decoder.vocab_size, 3, num_tokens).to(self._device)
        caches = [self.cache(num_slots=size, span=_capacity(num_tokens)) for _ in range(2)]
        self._decoder.prefill(prompts, [0, 1, 2], [0, 1, 2], caches[0])
        rows = torch.arange(size, device=self._device) % 3
        for position in range(num_tokens):
            positions = torch.full((size,), position, device=self._device)
            span = _capacity(position + 1)
            self._decoder.hidden(
                prompts[rows, position], positions, caches[1], span=span, first_slot=0
            )
        return all(
            _equal(*(cache.read(layer, 3, num_tokens)[part] for cache in caches))
            for layer in range(self._decoder.num_layers)
            for part in (0, 1)
        )


def agreeing_sizes(decoder: InvariantDecoder, sampling: Sampling) -> tuple[int, ...]:
    """The sizes of which any may be used for any row. Raises `DisagreementError`."""
    trial = Trial(decoder, sampling)
    expected = trial.outputs(torch.arange(trial.num_rows))
    sizes = []
    for size in decoder.sizes:
        rows = trial.permuted(size)
        found = trial.outputs(rows)
        if all(_equal(a, b[rows]) for a, b in zip(found, expected, strict=True)):
            sizes.append(size)
    if trial.num_rows not in sizes:
        raise _refusal("a row's numbers vary with its place in the batch")
    trial.use(tuple(sizes))
    if not trial.spans_agree(sizes[0]):
        raise _refusal("a row's numbers vary with the length of the longest sequence")
    if not trial.prefill_writes_what_decoding_writes(sizes[0]):
        raise _refusal("prefill and decoding of one token differ")
    return tuple(sizes)


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


def _capacity(num_tokens: int) -> int:
    return -(-num_tokens // SPAN_TOKENS) * SPAN_TOKENS


def _refusal(reason: str) -> DisagreementError:
    return DisagreementError(
        f"this model can't be run deterministically on this device: {reason};"
        " set rollout.engine.deterministic to false"
    )
