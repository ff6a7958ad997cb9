"""A small Qwen3-architecture model from nothing."""

from __future__ import annotations

from typing import Any

import torch

from jigsawrl.config import InitModelConfig


def build_model(config: InitModelConfig, tokenizer: Any, *, seed: int) -> Any:
    """A `Qwen3ForCausalLM` in float32 with transformers' own initialisation, the same for the same
    seed; its config names the tokenizer's pad and end-of-sequence ids."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=len(tokenizer),
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                tie_word_embeddings=False,
                attn_implementation="sdpa",
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
        ).float()
