"""How large the streams of a pipeline must be, and its part of a snapshot, from its configuration.

A data stream holds (staleness + depth + 1 + steps between checkpoints) batches of the longest record,
and with dynamic sampling the groups that may be filtered meanwhile.
Sizes are upper estimates: the stream refuses what does not fit, and the publisher then waits.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jigsawrl.config import InitModelConfig, PathModelConfig, PipelineConfig
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES, MAX_WEIGHT_BYTES
from jigsawrl.memory import DTYPE_BYTES, MAX_PROMPT_TOKENS, shape_of

BYTES_PER_TOKEN = 13
"""Of a sequence record: token, log-prob and version of 4 bytes each, loss mask of 1."""

TEXT_BYTES_PER_TOKEN = 8
"""Of prompt and response texts and problem fields, generously."""

RECORD_OVERHEAD_BYTES = 2048
"""Ids, keys, headers and JetStream's own bytes of one record."""

STATE_BYTES_PER_GROUP = 64
STATE_BYTES_PER_SEQUENCE = 64
"""Of a compressed snapshot. Measured with the longest names and random numbers: 53 a sequence in groups
of 8, 79 for a group of one (`test_the_bound_of_a_snapshot_holds`)."""

MAX_STATE_BYTES = MAX_PAYLOAD_BYTES * 3 // 4
"""For groups in a snapshot. The rest is for nodes, tenants and the fates of groups that ended."""

NUM_VERSIONS = 5
"""On the weight channel: the newest two, one being written, two pinned by evaluation."""


def longest_sequence_tokens(config: PipelineConfig) -> int:
    """Prompt, all turns, and what the environment says between them."""
    if isinstance(config.model, InitModelConfig):
        return config.model.max_position_embeddings
    return MAX_PROMPT_TOKENS + config.max_tokens_behind_prompt()


def longest_record_bytes(config: PipelineConfig) -> int:
    """Raises ValueError where it would not fit into one message."""
    num_tokens = longest_sequence_tokens(config)
    num_bytes = num_tokens * BYTES_PER_TOKEN + RECORD_OVERHEAD_BYTES
    if num_bytes > MAX_PAYLOAD_BYTES:
        raise ValueError(
            f"a sequence of {num_tokens} tokens needs a message of {num_bytes} bytes, but one holds"
            f" {MAX_PAYLOAD_BYTES}: lower rollout.sampling.max_new_tokens"
            + (" or task.num_turns" if config.turns().num_turns > 1 else "")
        )
    return num_bytes


def data_stream_bytes(config: PipelineConfig) -> int:
    """For the records of all groups that no checkpoint covers yet."""
    texts = longest_sequence_tokens(config) * TEXT_BYTES_PER_TOKEN + RECORD_OVERHEAD_BYTES
    # Its partial records together take twice the whole one at most (see the rollout service).
    per_sequence = 3 * longest_record_bytes(config) + texts
    per_group = config.algorithm.group_size * per_sequence + texts
    num_batches = _num_batches(config) + _num_filtered_batches(config)
    return num_batches * config.trainer.groups_per_batch * per_group


def state_bytes(config: PipelineConfig) -> int:
    """Of a snapshot, for the groups in flight and in cuts that no checkpoint covers."""
    group = STATE_BYTES_PER_GROUP + config.algorithm.group_size * STATE_BYTES_PER_SEQUENCE
    return _num_batches(config) * config.trainer.groups_per_batch * group


def check_state_bytes(config: PipelineConfig, *, others: Iterable[PipelineConfig]) -> None:
    """Raise ValueError where a snapshot could not hold it beside the pipelines that have not ended."""
    num_bytes, used = state_bytes(config), sum(map(state_bytes, others))
    if num_bytes + used > MAX_STATE_BYTES:
        raise ValueError(
            f"pipeline {config.name} needs up to {num_bytes} bytes of the scheduler's snapshots, which"
            f" hold {MAX_STATE_BYTES}, {used} of them for other pipelines: lower"
            " trainer.groups_per_batch, algorithm.group_size, trainer.checkpoint.every or the"
            " staleness and depth of mode"
        )


def _num_batches(config: PipelineConfig) -> int:
    """At once: in flight, and trained but in no checkpoint yet."""
    staleness, _, depth = config.staleness()
    return staleness + depth + 1 + _steps_between_checkpoints(config)


def _num_filtered_batches(config: PipelineConfig) -> int:
    """What dynamic sampling filters lies between what is trained, and is purged with it. The oldest
    group that is kept may have been admitted depth - 1 steps before its own; as many are generated
    beyond the last cut."""
    sampling = config.trainer.dynamic_sampling
    if sampling is None:
        return 0
    _, _, depth = config.staleness()
    return (_steps_between_checkpoints(config) + 2 * (depth - 1)) * sampling.max_batches


def _steps_between_checkpoints(config: PipelineConfig) -> int:
    """The last version has one always."""
    return min(config.trainer.checkpoint.every, config.trainer.num_steps)


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
    return shape_of(model).parameters * DTYPE_BYTES["float32"]
