"""How large the streams of a pipeline must be, from its configuration.

A data stream holds (staleness + depth + 1 + steps between checkpoints) batches of the longest record,
and with dynamic sampling the groups that may be filtered meanwhile.
Sizes are upper estimates: the stream refuses what does not fit, and the publisher then waits.
"""

from __future__ import annotations

from pathlib import Path

from jigsawrl.config import InitModelConfig, PathModelConfig, PipelineConfig
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES, MAX_WEIGHT_BYTES

BYTES_PER_TOKEN = 13
"""Of a sequence record: token, log-prob and version of 4 bytes each, loss mask of 1."""

TEXT_BYTES_PER_TOKEN = 8
"""Of prompt and response texts and problem fields, generously."""

RECORD_OVERHEAD_BYTES = 2048
"""Ids, keys, headers and JetStream's own bytes of one record."""

MAX_PROMPT_TOKENS = 8192
"""Assumed where the checkpoint does not bound it for us."""

MAX_VOCABULARY = 1024
"""Of a character tokenizer."""

NUM_VERSIONS = 5
"""On the weight channel: the newest two, one being written, two pinned by evaluation."""


def longest_sequence_tokens(config: PipelineConfig) -> int:
    """Prompt and response."""
    if isinstance(config.model, InitModelConfig):
        return config.model.max_position_embeddings
    return MAX_PROMPT_TOKENS + config.rollout.sampling.max_new_tokens


def longest_record_bytes(config: PipelineConfig) -> int:
    """Raises ValueError where it would not fit into one message."""
    num_tokens = longest_sequence_tokens(config)
    num_bytes = num_tokens * BYTES_PER_TOKEN + RECORD_OVERHEAD_BYTES
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a sequence of {num_tokens} tokens needs a message of {num_bytes} bytes, but one holds"
            f" {MAX_PAYLOAD_BYTES}: lower rollout.sampling.max_new_tokens"
        )
    return num_bytes


def data_stream_bytes(config: PipelineConfig) -> int:
    """For the records of all groups that no checkpoint covers yet."""
    staleness, _, depth = config.staleness()
    num_steps = config.trainer.checkpoint.every
    num_batches = staleness + depth + 1 + num_steps
    sampling = config.trainer.dynamic_sampling
    if sampling is not None:
        # What is filtered lies between what is trained, and is purged with it. The oldest group that
        # is kept may have been admitted depth - 1 steps before its own; as many are generated beyond
        # the last cut.
        num_batches += (num_steps + 2 * (depth - 1)) * sampling.max_batches
    texts = longest_sequence_tokens(config) * TEXT_BYTES_PER_TOKEN + RECORD_OVERHEAD_BYTES
    # Its partial records together take twice the whole one at most (see the rollout service).
    per_sequence = 3 * longest_record_bytes(config) + texts
    group_size = config.algorithm.group_size
    return num_batches * config.trainer.groups_per_batch * (group_size * per_sequence + texts)


def weights_stream_bytes(config: PipelineConfig) -> int:
    """For all versions that lie on the weight channel together."""
    version_bytes = min(_model_bytes(config), MAX_WEIGHT_BYTES)
    return NUM_VERSIONS * (version_bytes + version_bytes // 8 + 4 * 1024**2)


def _model_bytes(config: PipelineConfig) -> int:
    model = config.model
    if isinstance(model, PathModelConfig):
        files = [file.stat().st_size for file in Path(model.path).glob("*.safetensors")]
        # Half-precision checkpoints may be trained and published in float32.
        return 2 * sum(files) if files else MAX_WEIGHT_BYTES
    attention = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim * model.hidden_size
    layer = attention + 3 * model.hidden_size * model.intermediate_size + 4 * model.hidden_size
    return 4 * (2 * MAX_VOCABULARY * model.hidden_size + model.num_layers * layer)
