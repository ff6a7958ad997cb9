"""What each tenant of a pipeline needs on its device, estimated from its configuration.

The scheduler service asks `needed` at submission; the core then never places a tenant where it would
not fit. All numbers are upper estimates: a device that is too full kills whoever lives there.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from jigsawrl.config import InitModelConfig, PathModelConfig, PipelineConfig
from jigsawrl.config_algorithm import PPOConfig
from jigsawrl.contract.spec import MemorySpec

PROCESS_BYTES = 400 * 1024**2
"""A process with torch and transformers before it holds a tensor: 239 MiB resident on CPU, as
``python -c "import torch, transformers, psutil; print(psutil.Process().memory_info().rss)"`` prints,
and room for code, buffers and (on a GPU) its context."""

MAX_VOCABULARY = 1024
"""Of a character tokenizer."""

MAX_PROMPT_TOKENS = 8192
"""Assumed where nothing bounds it for us."""

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Of a Qwen3 or Llama model."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    tied: bool = False
    """Input and output embeddings are one matrix."""

    @property
    def parameters(self) -> int:
        """Embeddings; and per layer four attention matrices, three of the MLP, and norms."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        layer = attention + 3 * self.hidden * self.intermediate + 4 * self.hidden
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.layers * layer


def needed(config: PipelineConfig) -> MemorySpec:
    """Per role, as configured or else as estimated. Raises ValueError, one line, where the model's
    shape can't be read and not all roles are configured."""
    given = config.scheduling.memory
    evaluates = config.evaluation.enabled
    known = given.trainer_bytes and given.rollout_bytes
    if known and (given.evaluation_bytes or not evaluates):
        estimated = MemorySpec()
    else:
        estimated = estimate(config, shape_of(config.model))
    return MemorySpec(
        trainer=given.trainer_bytes or estimated.trainer,
        rollout=given.rollout_bytes or estimated.rollout,
        evaluation=(given.evaluation_bytes or estimated.evaluation) if evaluates else 0,
    )


def estimate(config: PipelineConfig, shape: ModelShape) -> MemorySpec:
    """By these formulas, with P parameters, R ranks, V the vocabulary, L the longest sequence:

    - trainer rank: 16 P / R bytes of weights, gradients and AdamW's two moments (float32, also where
      bfloat16 computes), 12 P for the state gathered whole at a checkpoint; with a KL penalty another
      4 P / R of the reference, with PPO another 16 P / R + 12 P of the critic; activations of a
      micro-batch of M = max(max_microbatch_tokens, L) tokens, M x layers x (14 hidden + 4 intermediate
      + 6 heads x head_dim) numbers; and logits, M x V x 12 bytes (log-softmax and gradient included);
    - rollout worker: 3 P numbers (weights, the next ones, and those on their way); keys and values,
      2 x layers x kv_heads x head_dim numbers for N x L positions; logits, N x V x 12 bytes. N is
      max_running, but not more sequences than a pipeline has in flight;
    - evaluation worker: the same with N = evaluation.max_running;
    - each: `PROCESS_BYTES`."""
    parameters, length = shape.parameters, _longest_tokens(config, shape)
    ranks = config.trainer.num_ranks
    per_optimized = 16 * parameters // ranks + 12 * parameters
    trainer = per_optimized
    if config.algorithm.kl is not None:
        trainer += 4 * parameters // ranks
    if isinstance(config.algorithm, PPOConfig):
        trainer += per_optimized
    tokens = max(config.trainer.max_microbatch_tokens, length)
    width = 14 * shape.hidden + 4 * shape.intermediate + 6 * shape.heads * shape.head_dim
    trainer += tokens * shape.layers * width * DTYPE_BYTES[config.trainer.dtype]
    trainer += tokens * shape.vocabulary * 12
    _, _, depth = config.staleness()
    in_flight = depth * config.trainer.groups_per_batch * config.algorithm.group_size

    def generating(sequences: int) -> int:
        number_bytes = DTYPE_BYTES[config.rollout.engine.dtype]
        position = 2 * shape.layers * shape.kv_heads * shape.head_dim
        numbers = 3 * parameters + sequences * length * position
        return PROCESS_BYTES + numbers * number_bytes + sequences * shape.vocabulary * 12

    return MemorySpec(
        trainer=PROCESS_BYTES + trainer,
        rollout=generating(min(config.rollout.engine.max_running, in_flight)),
        evaluation=generating(config.evaluation.max_running) if config.evaluation.enabled else 0,
    )


def shape_of(model: InitModelConfig | PathModelConfig) -> ModelShape:
    """As configured, or as the checkpoint's ``config.json`` says; raises ValueError."""
    if isinstance(model, InitModelConfig):
        return ModelShape(
            vocabulary=MAX_VOCABULARY,
            hidden=model.hidden_size,
            intermediate=model.intermediate_size,
            layers=model.num_layers,
            heads=model.num_heads,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            positions=model.max_position_embeddings,
        )
    path = Path(model.path) / "config.json"
    try:
        read = json.loads(path.read_text())
        heads = int(read["num_attention_heads"])
        return ModelShape(
            vocabulary=int(read["vocab_size"]),
            hidden=int(read["hidden_size"]),
            intermediate=int(read["intermediate_size"]),
            layers=int(read["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(read.get("num_key_value_heads") or heads),
            head_dim=int(read.get("head_dim") or read["hidden_size"] // heads),
            positions=int(read.get("max_position_embeddings") or MAX_PROMPT_TOKENS),
            tied=bool(read.get("tie_word_embeddings", False)),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"what model.path needs in memory can't be told from {path}"
            f" ({type(error).__name__}: {error}): set trainer_bytes, rollout_bytes and"
            " evaluation_bytes in [scheduling.memory]"
        ) from None


def _longest_tokens(config: PipelineConfig, shape: ModelShape) -> int:
    """Prompt and response."""
    return min(shape.positions, MAX_PROMPT_TOKENS + config.max_tokens_behind_prompt())
