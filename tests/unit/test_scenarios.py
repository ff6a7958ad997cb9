"""Scenarios of benchmarks: valid pipelines, from a file and drawn around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from jigsawrl.cli.config_file import load_config
from loadgen.bench import scenario


@pytest.fixture
def given() -> scenario.Scenario:
    return scenario.load(scenario.MULTIPLEX)


def test_a_written_pipeline_is_the_one_of_the_scenario(
    given: scenario.Scenario, tmp_path: Path
) -> None:
    configs = scenario.configs(given, num_pipelines=4, seed=3)
    paths = scenario.write(configs, tmp_path)
    assert [load_config(path) for path in paths] == configs
    assert [config.name for config in configs] == ["a", "b", "c", "d"]
    assert {config.trainer.num_steps for config in configs} == {given.num_steps}


def test_a_seed_moves_prompts_and_lengths_and_nothing_else(given: scenario.Scenario) -> None:
    one, other = (scenario.configs(given, num_pipelines=2, seed=seed) for seed in (0, 1))
    assert [a.seed for a in one] != [b.seed for b in other]
    assert [a.rollout for a in one] == [b.rollout for b in other]


def test_drawn_scenarios_are_valid_and_differ(given: scenario.Scenario) -> None:
    drawn = [scenario.varied(given, seed=seed) for seed in range(50)]
    configs = [scenario.configs(one, num_pipelines=4, seed=0) for one in drawn]
    assert len({str(one) for one in configs}) == 50
    assert scenario.varied(given, seed=7) == drawn[7]


def test_what_is_no_scenario_is_refused_with_its_path(
    given: scenario.Scenario, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.toml"
    for text in ("num_steps = ", "num_steps = 1\ncommon = {}\npipelines = {}\nother = 1"):
        broken.write_text(text)
        with pytest.raises(ValueError, match=r"broken\.toml"):
            scenario.load(broken)
    with pytest.raises(ValueError, match=r"missing\.toml"):
        scenario.load(tmp_path / "missing.toml")
    with pytest.raises(ValueError, match="4 pipelines only"):
        scenario.configs(given, num_pipelines=5, seed=0)
