"""How large a pipeline's streams are made."""

from __future__ import annotations

import pytest

from jigsawrl.config import (
    AsyncConfig,
    CheckpointConfig,
    DynamicSamplingConfig,
    InitModelConfig,
    PathModelConfig,
    PipelineConfig,
    RolloutConfig,
    SamplingConfig,
    SortDigitsConfig,
    SyncConfig,
    TrainerConfig,
)
from jigsawrl.config_algorithm import GRPOConfig, TruncateConfig
from services.scheduler.sizing import data_stream_bytes, longest_sequence_tokens


def config(mode: SyncConfig | AsyncConfig, max_batches: int | None) -> PipelineConfig:
    """Five steps between checkpoints."""
    sampling = None if max_batches is None else DynamicSamplingConfig(max_batches=max_batches)
    return PipelineConfig(
        name="p",
        mode=mode,
        model=InitModelConfig(),
        task=SortDigitsConfig(),
        algorithm=GRPOConfig(correction=TruncateConfig()),
        trainer=TrainerConfig(
            num_steps=9, checkpoint=CheckpointConfig(every=5), dynamic_sampling=sampling
        ),
    )


@pytest.mark.parametrize(
    ("mode", "num_batches", "num_filtered"),
    [(SyncConfig(), 7, 5 * 3), (AsyncConfig(max_staleness=2), 11, (5 + 2 * 2) * 3)],
)
def test_a_data_stream_has_room_for_what_dynamic_sampling_filters_between_checkpoints(
    mode: SyncConfig | AsyncConfig, num_batches: int, num_filtered: int
) -> None:
    without, with_filter = (data_stream_bytes(config(mode, n)) for n in (None, 3))
    assert with_filter * num_batches == without * (num_batches + num_filtered)


def test_a_record_has_room_for_all_turns_and_what_is_said_between_them() -> None:
    one, three = (
        PipelineConfig(
            name="p",
            model=PathModelConfig(path="/a/checkpoint"),
            task=SortDigitsConfig(num_turns=num_turns),
            rollout=RolloutConfig(sampling=SamplingConfig(max_new_tokens=100)),
            trainer=TrainerConfig(num_steps=1),
        )
        for num_turns in (1, 3)
    )
    marks = SortDigitsConfig().max_digits + 1
    assert longest_sequence_tokens(three) - longest_sequence_tokens(one) == 2 * (100 + marks)
    assert data_stream_bytes(three) > data_stream_bytes(one)
