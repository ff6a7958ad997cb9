"""What tenants need in memory, from the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from jigsawrl.config import (
    EvaluationConfig,
    InitModelConfig,
    PathModelConfig,
    PipelineConfig,
    RolloutConfig,
    SortDigitsConfig,
    TorchEngineConfig,
    TrainerConfig,
)
from jigsawrl.config_algorithm import KLConfig, PPOConfig
from jigsawrl.config_scheduling import MemoryConfig, SchedulingConfig
from jigsawrl.memory import estimate, needed, shape_of
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer

CONFIG = PipelineConfig(
    name="p",
    model=InitModelConfig(hidden_size=64, num_layers=2),
    task=SortDigitsConfig(),
    trainer=TrainerConfig(num_steps=1, groups_per_batch=64),
)


def changed(**changes: object) -> PipelineConfig:
    return msgspec.structs.replace(CONFIG, **changes)


def test_parameters_are_those_of_the_model_that_is_built() -> None:
    tokenizer = build_tokenizer("0123456789=")
    model = build_model(CONFIG.model, tokenizer, seed=0)  # type: ignore[arg-type]
    shape = msgspec.structs.replace(shape_of(CONFIG.model), vocabulary=len(tokenizer))
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built <= shape.parameters * 1.001
    assert shape.parameters <= built * 1.01


def test_each_part_of_the_formula_counts() -> None:
    shape = shape_of(CONFIG.model)
    base = estimate(CONFIG, shape)
    numbers = 2 * shape.layers * shape.kv_heads * shape.head_dim
    per_sequence = 4 * numbers * shape.positions + 12 * shape.vocabulary
    engine = RolloutConfig(engine=TorchEngineConfig(max_running=64))
    assert base.rollout - estimate(changed(rollout=engine), shape).rollout == 64 * per_sequence
    assert base.evaluation - base.rollout == 128 * per_sequence
    assert estimate(changed(evaluation=EvaluationConfig(enabled=False)), shape).evaluation == 0
    ranks = msgspec.structs.replace(CONFIG.trainer, num_ranks=2)
    assert base.trainer - estimate(changed(trainer=ranks), shape).trainer == 8 * shape.parameters
    kl = msgspec.structs.replace(CONFIG.algorithm, kl=KLConfig(coefficient=0.1))
    assert estimate(changed(algorithm=kl), shape).trainer - base.trainer == 4 * shape.parameters
    critic = estimate(changed(algorithm=PPOConfig()), shape).trainer - base.trainer
    assert critic == 28 * shape.parameters
    few = msgspec.structs.replace(CONFIG.trainer, groups_per_batch=1)
    assert estimate(changed(trainer=few), shape).rollout < base.rollout, "8 are in flight"


def test_what_is_configured_stands_and_the_rest_is_estimated() -> None:
    memory = MemoryConfig(trainer_bytes=7)
    given = needed(changed(scheduling=SchedulingConfig(memory=memory)))
    assert (given.trainer, given.rollout) == (7, needed(CONFIG).rollout)


def test_a_checkpoint_tells_its_shape_or_what_to_set(tmp_path: Path) -> None:
    fields = {
        "num_attention_heads": 4,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    config = changed(model=PathModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match=r"set trainer_bytes, rollout_bytes and evaluation_bytes"):
        needed(config)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    shape = shape_of(config.model)
    assert (shape.head_dim, shape.kv_heads, shape.tied) == (16, 4, True)
    assert needed(config).trainer > 0
    (tmp_path / "config.json").write_text("[]")
    given = MemoryConfig(trainer_bytes=1, rollout_bytes=2, evaluation_bytes=3)
    assert (
        needed(changed(model=config.model, scheduling=SchedulingConfig(memory=given))).rollout == 2
    )
