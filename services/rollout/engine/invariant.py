"""The decoder whose every row has the same bits whatever else is computed beside it.

Called by `torch_engine` where the engine is deterministic. What makes it so: a matrix product, a
norm or an activation gives a row bits that may depend on how many rows there are, never on which
ones. So all work is done in a few fixed numbers of rows, padded, and `agreement` finds out at the
start which of these numbers give equal bits on this machine with this model. What depends on the
number of positions is cut into pieces of fixed size:

* Attention spans are multiples of 32. Masked positions have weight 0 exactly, and softmax adds
  them up in an order of which a longer span is a continuation.
* Weights times values is summed over blocks of 128 positions, one after the other. (MKL splits a
  longer sum in halves, so that its order would depend on the span.)
* Queries come in fours at least, because products of fewer rows run in other kernels. Then the
  queries of a prompt, many positions at once, get the bits of a query that is decoded alone.

Prefill therefore writes what decoding would have written, and it does not matter which of the two
computed a position: for a group, on another worker, from a record, or after a change of weights.

Left out: heads whose size is no multiple of 4 (MKL's kernels for the remainder depend on the number
of rows); they are refused.

Letters as in `model`, and R rows · L positions of one piece of a prompt · B heads of all sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from services.rollout.engine.cache import SlotCache
from services.rollout.engine.model import Decoder, Layer, Part

SIZES: tuple[int, ...] = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Numbers of rows that work is padded to. Steps of at most a half keep padding small; from 256 on
the cost of a row no longer falls, so more rows are computed in several turns."""
SPAN_TOKENS = 32
VALUE_TOKENS = 128
"""Positions that are summed in one product. MKL starts to split sums at 192."""
MIN_QUERIES = 4
PIECE_TOKENS = 32
"""Positions of a prompt whose attention is one product."""
PIECE_UNIT = 8
VOCABULARY_UNIT = 16
"""Logits are padded to this, so that a vector never ends in the next row."""


class InvariantDecoder(Decoder):
    """One version of the weights, ready to run."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        *,
        model_config: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(state, model_config=model_config, device=device, dtype=dtype)
        if self.head_dim % 4:
            raise ValueError(
                f"a deterministic engine needs heads whose size is a multiple of 4, not"
                f" {self.head_dim}; set rollout.engine.deterministic to false"
            )
        self.sizes = SIZES
        """The numbers of rows in use, ascending."""
        # The table of angles is made once: its last entries may depend on its length.
        self._rotations(self.max_positions)

    def parts(self, num: int) -> list[Part]:
        largest = self.sizes[-1]
        return [
            Part(first, min(first + largest, num), self._size(min(largest, num - first)))
            for first in range(0, num, largest)
        ] or [Part(0, 0, 0)]

    def _size(self, num: int) -> int:
        return next(size for size in self.sizes if size >= num)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """See `Decoder.logits`; the vocabulary is padded with logits of minus infinity."""
        logits_NV = super().logits(hidden_NE)
        padding = -logits_NV.shape[1] % VOCABULARY_UNIT
        return F.pad(logits_NV, (0, padding), value=-torch.inf) if padding else logits_NV

    def prefill(
        self, tokens_NT: Tensor, slots: list[int], rows: list[int], cache: SlotCache
    ) -> None:
        """See `Decoder.prefill`."""
        span = tokens_NT.shape[1]
        tokens_NT = F.pad(tokens_NT, (0, -span % PIECE_UNIT))
        num, padded = tokens_NT.shape
        positions_T = torch.arange(padded, device=self.device).clamp(max=self.max_positions - 1)
        tokens_R, positions_R = tokens_NT.reshape(-1), positions_T.repeat(num)
        parts = self.parts(num * padded)
        excess = parts[-1].first + parts[-1].size - num * padded
        rotations = self._rotations(span)[F.pad(positions_R, (0, excess))][:, None]
        x = F.embedding(F.pad(tokens_R, (0, excess)), self._embedding)
        row_index = torch.tensor(rows, device=self.device)
        slot_index = torch.tensor(slots, device=self.device)
        for number, layer in enumerate(self._layers):
            q, k, v = (
                part[: num * padded].view(num, padded, -1, self.head_dim).transpose(1, 2)
                for part in self._project_parts(x, layer, rotations, parts)
            )
            new_keys, new_values = (part[row_index, :, :span] for part in (k, v))
            cache.fill(number, new_keys, new_values, slot_index)
            if number + 1 < self.num_layers:
                mixed = F.pad(self._attend_prompts(q, k, v), (0, 0, 0, excess))
                x = torch.cat([self._finish(x[at], mixed[at], layer) for at in _slices(parts)])

    def _project_parts(
        self, x: Tensor, layer: Layer, rotations: Tensor, parts: list[Part]
    ) -> list[Tensor]:
        projected = [self._project(x[at], layer, rotations[at]) for at in _slices(parts)]
        return [torch.cat(pieces) for pieces in zip(*projected, strict=True)]

    def _attend_prompts(self, q_NHTD: Tensor, k_NKTD: Tensor, v_NKTD: Tensor) -> Tensor:
        """Causal attention of all positions, in pieces; [N * T, H * D]."""
        num, _, padded, _ = q_NHTD.shape
        padding = (0, 0, 0, -padded % SPAN_TOKENS)
        keys_BTD, values_BTD = (F.pad(part, padding).flatten(0, 1) for part in (k_NKTD, v_NKTD))
        mixed = []
        for first in range(0, padded, PIECE_TOKENS):
            piece = q_NHTD[:, :, first : first + PIECE_TOKENS]
            length = piece.shape[2]
            span = first + PIECE_TOKENS
            columns = torch.arange(span, device=self.device)
            mask_LT = torch.zeros(length, span, dtype=self.dtype, device=self.device)
            mask_LT.masked_fill_(columns > first + columns[:length, None], -torch.inf)
            queries = piece.reshape(num * self.num_kv_heads, -1, self.head_dim)
            mask = mask_LT.repeat(self.num_heads // self.num_kv_heads, 1)[None]
            out = self._mix(queries, keys_BTD[:, :span], values_BTD[:, :span], mask)
            mixed.append(out.view(num, self.num_heads, length, self.head_dim))
        return torch.cat(mixed, dim=2).transpose(1, 2).reshape(num * padded, -1)

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask_N11T: Tensor) -> Tensor:
        num, span = mask_N11T.shape[0], mask_N11T.shape[-1]
        queries = q.reshape(num * self.num_kv_heads, -1, self.head_dim)
        num_queries = queries.shape[1]
        if num_queries < MIN_QUERIES:
            queries = F.pad(queries, (0, 0, 0, MIN_QUERIES - num_queries))
        mask = mask_N11T.expand(num, self.num_kv_heads, 1, span).reshape(-1, 1, span)
        mixed = self._mix(queries, keys, values, mask)
        return mixed[:, :num_queries].reshape(num, -1)

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Queries [B, L, D] against keys and values [B, T, D]; mask [B or 1, L or 1, T]."""
        mask = mask.expand(queries.shape[0], -1, -1)
        scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=self.head_dim**-0.5)
        weights = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        mixed = torch.bmm(weights[..., :VALUE_TOKENS], values[:, :VALUE_TOKENS])
        for first in range(VALUE_TOKENS, values.shape[1], VALUE_TOKENS):
            block = slice(first, first + VALUE_TOKENS)
            mixed = torch.baddbmm(mixed, weights[..., block], values[:, block])
        return mixed


def _slices(parts: list[Part]) -> list[slice]:
    return [slice(part.first, part.first + part.size) for part in parts]
