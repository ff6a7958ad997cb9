"""Keys and values of running sequences, in slots; running sequences fill slots 0 to N - 1.

Called by `torch_engine` and `model`. Contiguous slots make the cache of a decode step a view, with
nothing gathered; the price is that a sequence that leaves is replaced by a copy of the last one.

Letters: N sequences · K key-value heads · T positions · D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class WriteAt(NamedTuple):
    """Rows of the flattened cache of one layer where a step's keys and values go."""

    rows: Tensor
    num: int


class SlotCache:
    """The cache of one engine; grows in slots and in positions as sequences need them."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._num_layers, self._num_kv_heads, self._head_dim = num_layers, num_kv_heads, head_dim
        self._device, self._dtype = device, dtype
        self.num_slots = 0
        self.capacity_tokens = 0
        """Positions per slot."""
        self._keys = self._zeros()
        self._values = self._zeros()

    def _zeros(self) -> Tensor:
        # Zeros, not empty: a masked position has weight 0, and 0 times a stray NaN is NaN.
        return torch.zeros(
            self._num_layers,
            self.num_slots,
            self._num_kv_heads,
            self.capacity_tokens,
            self._head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    def grow(self, *, num_slots: int, capacity_tokens: int) -> None:
        """Have at least this much room; what is stored stays."""
        if num_slots <= self.num_slots and capacity_tokens <= self.capacity_tokens:
            return
        old_slots, old_capacity = self.num_slots, self.capacity_tokens
        self.num_slots = max(num_slots, old_slots)
        self.capacity_tokens = max(capacity_tokens, old_capacity)
        old_keys, old_values = self._keys, self._values
        self._keys, self._values = self._zeros(), self._zeros()
        self._keys[:, :old_slots, :, :old_capacity] = old_keys
        self._values[:, :old_slots, :, :old_capacity] = old_values

    def write_at(self, positions_N: Tensor, *, first_slot: int = 0) -> WriteAt:
        """Where one position of each of N slots lies, for all layers alike."""
        num = positions_N.shape[0]
        begin, end = (slot * self._num_kv_heads for slot in (first_slot, first_slot + num))
        starts = torch.arange(begin, end, device=self._device) * self.capacity_tokens
        rows = (starts.view(num, -1) + positions_N[:, None]).view(-1)
        return WriteAt(rows, num)

    def write(self, layer: int, keys_NKD: Tensor, values_NKD: Tensor, at: WriteAt) -> None:
        """One position of each of N slots."""
        for store, new in ((self._keys, keys_NKD), (self._values, values_NKD)):
            store[layer].view(-1, self._head_dim).index_copy_(
                0, at.rows, new.reshape(-1, self._head_dim)
            )

    def read(
        self, layer: int, num: int, span: int, *, first_slot: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Keys and values of the first `span` positions of `num` slots, as views [N * K, T, D]."""
        keys, values = self._keys[layer], self._values[layer]
        shape = (self.num_slots * self._num_kv_heads, self.capacity_tokens, self._head_dim)
        begin, end = (slot * self._num_kv_heads for slot in (first_slot, first_slot + num))
        return keys.view(shape)[begin:end, :span], values.view(shape)[begin:end, :span]

    def fill(self, layer: int, keys_NKTD: Tensor, values_NKTD: Tensor, slots_N: Tensor) -> None:
        """The first T positions of chosen slots."""
        span = keys_NKTD.shape[2]
        self._keys[layer, :, :, :span].index_copy_(0, slots_N, keys_NKTD.contiguous())
        self._values[layer, :, :, :span].index_copy_(0, slots_N, values_NKTD.contiguous())

    def copy(self, sources: list[int], targets: list[int], *, span: int) -> None:
        """Copy the first `span` positions from slots to slots (sources and targets disjoint)."""
        # Copies of slices: index_select of a slice gathers row by row, ten times slower on CPU.
        for store in (self._keys, self._values):
            for source, target in zip(sources, targets, strict=True):
                store[:, target, :, :span] = store[:, source, :, :span]
