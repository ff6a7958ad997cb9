"""The example learns, on any seed, and only from its rewards. These are whole runs of the example that
`make run` trains: minutes each. One seed runs in `make test-slow`, the rest in `make test-learning`;
the control without a learning rate is in test-slow on a smaller pipeline (`test_controls.py`)."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.integration.live_run import LiveRun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sort-digits.toml"
RUN_TIMEOUT_S = 900.0
SEEDS = (0, 1, 2)


def accuracies(folder: Path, *overrides: str) -> tuple[float, float]:
    """Held-out accuracy before and after."""
    with LiveRun(folder, *overrides, pipeline=EXAMPLE.read_text()) as live:
        assert live.wait(RUN_TIMEOUT_S) == 0, live.story()
        result = live.summary()["pipelines"]["sort-digits"]
    groups = result["groups"]
    assert groups["admitted"] == groups["trained"]
    assert groups["in_flight"] == 0
    return result["eval_before"], result["eval_after"]


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_the_example_solves_a_fifth_more_of_the_held_out_problems(tmp_path: Path) -> None:
    before, after = accuracies(tmp_path)
    assert 0.35 <= before <= 0.65
    assert after - before >= 0.2


@pytest.mark.learning
@pytest.mark.timeout(1000)
def test_a_learning_rate_of_zero_teaches_nothing(tmp_path: Path) -> None:
    before, after = accuracies(
        tmp_path, "trainer.optimizer.learning_rate=0", "trainer.num_steps=10", "evaluation.every=5"
    )
    assert abs(after - before) < 0.03


@pytest.mark.learning
@pytest.mark.timeout(3000)
def test_the_example_gains_a_quarter_of_all_problems_in_the_median_of_three_seeds(
    tmp_path: Path,
) -> None:
    pairs = [accuracies(tmp_path / str(seed), f"seed={seed}") for seed in SEEDS]
    gains = [after - before for before, after in pairs]
    assert all(0.35 <= before <= 0.65 for before, _ in pairs), pairs
    assert min(gains) >= 0.2, pairs
    assert statistics.median(gains) >= 0.25, pairs


@pytest.mark.learning
@pytest.mark.timeout(1000)
def test_rewards_permuted_within_each_batch_teach_nothing(tmp_path: Path) -> None:
    before, after = accuracies(tmp_path, 'trainer.control="permuted_rewards"')
    assert after - before < 0.05
