"""The decoder of Qwen3 and Llama, as the engine runs it: inference only, on a cache of slots.

Called by `torch_engine`. Weights and configs are transformers' own; the forward is ours, because
one fused, slot-wise forward costs a third of the operations of the general one. It equals
transformers' forward up to rounding: query, key and value projections are one product, gate and up
another, and the halves of each head that the rotary embedding pairs are interleaved in the weights,
so that a rotation is one complex product (queries and keys are permuted alike, so their products do
not change).

Letters: N sequences · T positions · H query heads · K key-value heads · G query heads per key-value
head · D head size · E hidden size.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsawrl.config import ARCHITECTURES
from services.rollout.engine.cache import SlotCache

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary variants whose angles depend on the position alone."""


class Layer(NamedTuple):
    """Weights of one layer."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    head_norm: Tensor | None
    """[H + K, D]: Qwen3's norms of queries and keys."""
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


class Part(NamedTuple):
    """Running sequences that are decoded together: those of slots `first` to `end` - 1, as `size`
    rows, of which the ones beyond `end` are padding."""

    first: int
    end: int
    size: int


class Decoder:
    """One version of the weights, ready to run."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        *,
        model_config: str,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config = parse_config(model_config)
        self._config = config
        self.device, self.dtype = device, dtype
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.max_positions: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        self.stop_tokens = stop_tokens(config)
        self._eps: float = config.rms_norm_eps
        self._state: Mapping[str, Tensor] = state
        self._layers = [self._layer(f"model.layers.{i}.") for i in range(self.num_layers)]
        self._embedding = self._tensor("model.embed_tokens.weight")
        self._norm = self._tensor("model.norm.weight")
        head = "lm_head.weight"
        tied = config.tie_word_embeddings or head not in state
        self._head = self._embedding if tied else self._tensor(head)
        self._state = {}
        self._rotations_TD = torch.empty(0, self.head_dim // 2, dtype=torch.complex64)

    def beginning(self, *, num_layers: int) -> Self:
        """The same weights, with only the first layers before the output head."""
        part = copy.copy(self)
        part._layers = self._layers[:num_layers]
        part.num_layers = len(part._layers)
        return part

    # --- Weights ----------------------------------------------------------------------------------

    def _tensor(self, name: str) -> Tensor:
        if name not in self._state:
            raise ValueError(f"the weights lack {name}; were they made by another architecture?")
        return self._state[name].to(device=self.device, dtype=self.dtype, copy=True)

    def _optional(self, *names: str) -> Tensor | None:
        if names[0] not in self._state:
            return None
        return torch.cat([self._tensor(name) for name in names])

    def _layer(self, at: str) -> Layer:
        attention = at + "self_attn."
        biases = [f"{attention}{kind}_proj.bias" for kind in "qkv"]
        queries = self._interleaved(self._tensor(f"{attention}q_proj.weight"))
        keys = self._interleaved(self._tensor(f"{attention}k_proj.weight"))
        qkv_bias = None
        if biases[0] in self._state:
            query_bias, key_bias = (self._interleaved(self._tensor(name)) for name in biases[:2])
            qkv_bias = torch.cat([query_bias, key_bias, self._tensor(biases[2])])
        gate_up = [f"{at}mlp.{kind}_proj" for kind in ("gate", "up")]
        return Layer(
            input_norm=self._tensor(f"{at}input_layernorm.weight"),
            qkv=torch.cat([queries, keys, self._tensor(f"{attention}v_proj.weight")]),
            qkv_bias=qkv_bias,
            head_norm=self._head_norm(attention),
            output=self._tensor(f"{attention}o_proj.weight"),
            output_bias=self._optional(f"{attention}o_proj.bias"),
            mlp_norm=self._tensor(f"{at}post_attention_layernorm.weight"),
            gate_up=torch.cat([self._tensor(f"{name}.weight") for name in gate_up]),
            gate_up_bias=self._optional(*(f"{name}.bias" for name in gate_up)),
            down=self._tensor(f"{at}mlp.down_proj.weight"),
            down_bias=self._optional(f"{at}mlp.down_proj.bias"),
        )

    def _head_norm(self, attention: str) -> Tensor | None:
        if f"{attention}q_norm.weight" not in self._state:
            return None
        queries, keys = (
            self._interleaved(self._tensor(f"{attention}{kind}_norm.weight"))[None] for kind in "qk"
        )
        return torch.cat([queries.expand(self.num_heads, -1), keys.expand(self.num_kv_heads, -1)])

    def _interleaved(self, weight: Tensor) -> Tensor:
        """Dimension i of a head's first half next to dimension i of its second."""
        halves = weight.reshape(-1, 2, self.head_dim // 2, *weight.shape[1:])
        return halves.transpose(1, 2).reshape(weight.shape)

    def _rotations(self, num_positions: int) -> Tensor:
        """[T, D / 2] rotation of each position, computed by transformers' own rotary module."""
        if min(num_positions, self.max_positions) > self._rotations_TD.shape[0]:
            from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

            # Llama's and Qwen3's modules are the same code; angles in float32 as there.
            size = min(self.max_positions, max(256, 2 * num_positions))
            rotary = LlamaRotaryEmbedding(self._config)
            cos, sin = rotary(torch.zeros(1), torch.arange(size)[None])
            half = self.head_dim // 2
            rotations = torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float())
            self._rotations_TD = rotations.to(self.device)
        return self._rotations_TD

    # --- Forward ----------------------------------------------------------------------------------

    def parts(self, num: int) -> list[Part]:
        """How `num` running sequences are to be decoded: all at once."""
        return [Part(0, num, num)]

    def decode(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        cache: SlotCache,
        *,
        span: int,
        first_slot: int = 0,
    ) -> Tensor:
        """Float32 logits [N, V] after one more token in each of N slots, whose keys and values are
        added to the cache. `span` bounds all positions, this token's included."""
        return self.logits(
            self.hidden(tokens_N, positions_N, cache, span=span, first_slot=first_slot)
        )

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """The output head, [N, V] float32."""
        return F.linear(hidden_NE, self._head).float()

    def hidden(
        self,
        tokens_N: Tensor,
        positions_N: Tensor,
        cache: SlotCache,
        *,
        span: int,
        first_slot: int,
    ) -> Tensor:
        """What `decode` gives to the output head, [N, E]."""
        num = tokens_N.shape[0]
        rotations = self._rotations(span)[positions_N][:, None]
        write = cache.write_at(positions_N, first_slot=first_slot)
        # What lies behind a sequence's end is zeros or an old sequence's; never attended to.
        columns = torch.arange(span, device=self.device)
        mask = torch.zeros(num, span, dtype=self.dtype, device=self.device)
        mask.masked_fill_(columns > positions_N[:, None], -torch.inf)
        mask_N11T = mask[:, None, None, :]
        x = F.embedding(tokens_N, self._embedding)
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(x, layer, rotations)
            cache.write(number, k, v, write)
            keys, values = cache.read(number, num, span, first_slot=first_slot)
            mixed = self._attend(q, keys, values, mask_N11T)
            x = self._finish(x, mixed, layer)
        return F.rms_norm(x, x.shape[-1:], self._norm, self._eps)

    def prefill(
        self, tokens_NT: Tensor, slots: list[int], rows: list[int], cache: SlotCache
    ) -> None:
        """Compute keys and values of prefixes (padded on the right) and write row ``rows[i]`` to
        slot ``slots[i]``. Causality keeps padding out of every real position."""
        num, span = tokens_NT.shape
        rotations = self._rotations(span)[:span].repeat(num, 1)[:, None]
        x = F.embedding(tokens_NT.reshape(-1), self._embedding)
        shape = (num, span, -1, self.head_dim)
        row_index = torch.tensor(rows, device=self.device)
        slot_index = torch.tensor(slots, device=self.device)
        for number, layer in enumerate(self._layers):
            q, k, v = self._project(x, layer, rotations)
            q, k, v = (part.reshape(shape).transpose(1, 2) for part in (q, k, v))
            cache.fill(number, k[row_index], v[row_index], slot_index)
            if number + 1 < self.num_layers:
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                mixed = mixed.transpose(1, 2).reshape(num * span, -1)
                x = self._finish(x, mixed, layer)

    def _project(self, x: Tensor, layer: Layer, rotations: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.rms_norm(x, x.shape[-1:], layer.input_norm, self._eps)
        qkv = F.linear(x, layer.qkv, layer.qkv_bias)
        heads = qkv.view(x.shape[0], -1, self.head_dim)
        num_rotated = self.num_heads + self.num_kv_heads
        rotated = heads[:, :num_rotated]
        if layer.head_norm is not None:
            rotated = F.rms_norm(rotated, (self.head_dim,), None, self._eps) * layer.head_norm
        pairs = rotated.float().reshape(x.shape[0], num_rotated, -1, 2)
        turned = torch.view_as_complex(pairs) * rotations
        rotated = torch.view_as_real(turned).flatten(-2).to(self.dtype)
        return (
            rotated[:, : self.num_heads],
            rotated[:, self.num_heads :],
            heads[:, num_rotated:],
        )

    def _attend(self, q: Tensor, keys: Tensor, values: Tensor, mask_N11T: Tensor) -> Tensor:
        """One query a sequence, [N, H, D], against keys and values [N * K, T, D]; [N, H * D]."""
        num, span = mask_N11T.shape[0], mask_N11T.shape[-1]
        q = q.reshape(num * self.num_kv_heads, -1, self.head_dim)
        mask = mask_N11T.expand(num, self.num_kv_heads, 1, span).reshape(-1, 1, span)
        scores = torch.baddbmm(mask, q, keys.transpose(1, 2), alpha=self.head_dim**-0.5)
        weights = scores.softmax(-1, dtype=torch.float32).to(self.dtype)
        return torch.bmm(weights, values).view(num, -1)

    def _finish(self, x: Tensor, mixed: Tensor, layer: Layer) -> Tensor:
        x = x + F.linear(mixed, layer.output, layer.output_bias)
        inner = F.rms_norm(x, x.shape[-1:], layer.mlp_norm, self._eps)
        gate, up = F.linear(inner, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down, layer.down_bias)


def parse_config(model_config: str) -> Any:
    """transformers' config object; raises ValueError for what this decoder can't run."""
    from transformers import AutoConfig

    fields = json.loads(model_config)
    kind = fields.pop("model_type", None)
    if kind not in ARCHITECTURES:
        names = " and ".join(ARCHITECTURES)
        raise ValueError(f"the rollout engine runs {names} models, not {kind!r}")
    config = AutoConfig.for_model(kind, **fields)
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in ROPE_TYPES:
        raise ValueError(
            f"the rollout engine can't run rotary embeddings of type {rope_type!r};"
            f" it knows {', '.join(ROPE_TYPES)}"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ValueError("the rollout engine can't run layers with sliding attention")
    return config


def stop_tokens(config: Any) -> tuple[int, ...]:
    """Ids that end a sequence, from the model's config."""
    if config.eos_token_id is None:
        return ()
    ids = config.eos_token_id
    return tuple(ids) if isinstance(ids, list | tuple) else (ids,)
