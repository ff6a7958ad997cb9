"""Groups that have no baseline of their own: one survivor, or equal rewards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from jigsawrl.config import PipelineConfig
from jigsawrl.config_algorithm import (
    AlgorithmConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
)
from jigsawrl.contract.message import Ledger
from services.trainer.batch import Sample
from services.trainer.credit import token_advantages
from tests.unit.trainer.test_learner import started


def alone(samples: list[Sample]) -> list[Sample]:
    """Two groups with one survivor each, whose rewards differ."""
    return [replace(sample, group=f"g{i}", reward=float(i)) for i, sample in enumerate(samples[:2])]


@pytest.mark.parametrize("algorithm", [ReinforcePlusPlusConfig(), PPOConfig()])
def test_one_survivor_is_trained_with_a_baseline_of_the_batch_or_a_critic(
    algorithm: AlgorithmConfig, config: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    with started(msgspec.structs.replace(config, algorithm=algorithm), tmp_path) as learner:
        metrics = learner.train(alone(samples), version=0, ledger=Ledger())
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("algorithm", "teaches"),
    [(GRPOConfig(), False), (RLOOConfig(), False), (ReinforcePlusPlusConfig(), True)],
)
def test_equal_rewards_teach_only_where_the_baseline_is_not_the_groups(
    algorithm: AlgorithmConfig, teaches: bool, samples: list[Sample]
) -> None:
    rewards = {"g0": 1.0, "g1": 0.0}
    uniform = [replace(s, reward=rewards[s.group]) for s in samples if s.group in rewards]
    advantages = token_advantages(uniform, algorithm)
    assert any(bool(values.any()) for values in advantages) is teaches
    assert algorithm.group_relative is not teaches
