"""Pipeline files: what they resolve to, and the one line that says what is wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from jigsawrl.cli.config_file import load_config, to_json, to_toml
from jigsawrl.cli.errors import ConfigError
from jigsawrl.config import JsonlTaskConfig, LinearScheduleConfig, PathModelConfig
from jigsawrl.config_algorithm import CriticConfig, GRPOConfig, PPOClipConfig, PPOConfig
from jigsawrl.config_tracking import TrackingConfig, WandbConfig
from tests.unit.cli.files import PIPELINE, write_checkpoint, write_pipeline, write_safetensors


def complaint(path: Path, *overrides: str) -> str:
    """The error's text after the file's name; it is one line."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides=overrides)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


def test_defaults_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    config = load_config(write_pipeline(tmp_path))
    assert config.name == "tiny"
    assert config.algorithm.group_size == 8
    assert config.trainer.num_steps == 3


def test_an_override_is_read_as_toml_and_else_as_text(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    overrides = (
        "trainer.num_steps=7",
        "name=other",
        'trainer.schedule={type = "linear", final_fraction = 0.1}',
        "rollout.sampling.temperature=1",
    )
    config = load_config(path, overrides=overrides)
    assert (config.trainer.num_steps, config.name) == (7, "other")
    assert config.trainer.schedule == LinearScheduleConfig(final_fraction=0.1)
    assert config.rollout.sampling.temperature == 1.0


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "trainer.lerning_rate=1",
            "trainer.lerning_rate: unknown key; did you mean trainer.optimizer.learning_rate?",
        ),
        ("temprature=1", "temprature: unknown key; did you mean rollout.sampling.temperature?"),
        ("rollout.samplin.top_k=3", "rollout.samplin: unknown key; did you mean rollout.sampling?"),
        (
            "rollout.sampling.zzz=1",
            "rollout.sampling.zzz: unknown key; valid here: temperature, top_p, top_k,"
            " max_new_tokens",
        ),
        ("algorithm.kl.estimator=k2", "algorithm.kl.coefficient: missing"),
        (
            'trainer.schedule={type = "constant", final_fraction = 0.1}',
            'trainer.schedule.final_fraction: no effect with type = "constant"; it belongs to'
            ' type = "linear" or "cosine"',
        ),
        (
            'model={type = "path", path = "x", warmup = {}}',
            'model.warmup: no effect with type = "path"; it belongs to type = "init"',
        ),
        (
            "trainer.schedule.type=liner",
            "trainer.schedule.type: unknown value 'liner'; did you mean \"linear\"?",
        ),
        ("rollout.engine.type=abacus", "rollout.engine.type: unknown value 'abacus'; one of"),
        (
            "trainer.schedule.warmup_steps=1",
            'trainer.schedule.type: missing; one of "constant", "linear", "cosine"',
        ),
        ("rollout.engine.dtype=half", "rollout.engine.dtype: 'half' is none of \"bfloat16\","),
        ("trainer.num_steps=many", "trainer.num_steps: expected `int`, got `str`"),
        ("trainer.num_steps=0", "trainer.num_steps: expected `int` >= 1"),
        ("trainer.num_steps.a=1", "--set trainer.num_steps.a=1: trainer.num_steps is no table"),
        ("trainer.optimizer.beta1=nan", "trainer.optimizer.beta1: nan is no finite number"),
        ("seed=9223372036854775808", "seed: 9223372036854775808 does not fit 64 bits"),
        ("rollout=3", "rollout: expected a table, got `int`"),
        ("name='a b'", "name 'a b' must be 1 to 63 letters"),
        ("task.min_digits=9", "task: min_digits 9 exceeds max_digits 8"),
        ("trainer.num_minibatches=99", "trainer: num_minibatches must not exceed"),
        (
            'trainer.schedule={type = "linear", warmup_steps = 3}',
            "trainer: schedule.warmup_steps 3 must be below num_steps 3",
        ),
        (
            "rollout.sampling.max_new_tokens=512",
            "rollout.sampling.max_new_tokens: 512 leaves no room for a prompt",
        ),
        (
            "algorithm.gamma=0.9",
            'algorithm.gamma: no effect with type = "grpo"; it belongs to'
            ' type = "reinforce_plus_plus" or "ppo"',
        ),
        (
            "algorithm.clip_low=0.1",
            "algorithm.clip_low: unknown key; did you mean algorithm.loss.clip_low?",
        ),
        (
            "algorithm.loss.type=gspo",
            'algorithm: loss.type = "gspo" is a mean over sequences: set aggregation =',
        ),
        (
            'algorithm.loss={type = "ppo_clip", dual_clip = 1.0}',
            "algorithm.loss.dual_clip: expected `float` > 1",
        ),
        (
            "algorithm.correction.type=sequence_mask",
            "algorithm.correction.gate: missing",
        ),
        (
            'algorithm.correction={type = "icepop", high = 0.9}',
            "algorithm.correction.high: expected `float` >= 1",
        ),
        (
            "algorithm.overlong.buffer_tokens=1000",
            "algorithm.overlong.buffer_tokens 1000 exceeds rollout.sampling.max_new_tokens",
        ),
        (
            'mode={type = "async", max_staleness = 1, sample_bound = 2}',
            "mode: sample_bound 2 has no effect above max_staleness 1",
        ),
        ("num_steps", "--set num_steps: write it as key=value"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_key(
    tmp_path: Path, override: str, expected: str
) -> None:
    assert complaint(write_pipeline(tmp_path), override).startswith(expected)


def test_a_missing_table_and_a_missing_key_are_named(tmp_path: Path) -> None:
    without_trainer = PIPELINE.partition("[trainer]")[0]
    assert complaint(write_pipeline(tmp_path, without_trainer)) == "trainer: missing"
    assert complaint(write_pipeline(tmp_path, f"{without_trainer}[trainer]")) == (
        "trainer.num_steps: missing"
    )
    no_tag = PIPELINE.replace('type = "sort-digits"', "")
    assert complaint(write_pipeline(tmp_path, no_tag)).startswith("task.type: missing; one of")


def test_malformed_toml_names_the_line(tmp_path: Path) -> None:
    assert "at line 3" in complaint(write_pipeline(tmp_path, 'name = "a"\n\nseed =\n'))


def test_an_unreadable_file_says_what_to_do(tmp_path: Path) -> None:
    assert complaint(tmp_path / "none.toml").startswith("no such file")
    assert complaint(tmp_path).startswith("can't be read")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b'name = "\xff"')
    assert complaint(binary) == "no UTF-8 text at byte 8; save it as UTF-8"


def test_clipping_is_refused_where_it_can_not_bind(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    higher = 'algorithm.loss={type = "ppo_clip", clip_high = 0.28}'
    assert complaint(path, higher).startswith(
        "algorithm.loss: no effect with trainer.num_minibatches = 1"
    )
    for other in ("trainer.num_minibatches=2", "algorithm.proximal=loglinear"):
        loss = load_config(path, overrides=(higher, other)).algorithm.loss
        assert loss == PPOClipConfig(clip_high=0.28)


def test_a_value_clip_is_refused_where_it_can_not_bind(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    overrides = ("algorithm.type=ppo", "algorithm.critic.value_clip=0.1")
    assert complaint(path, *overrides).startswith(
        "algorithm.critic.value_clip: no effect with trainer.num_minibatches = 1"
    )
    algorithm = load_config(path, overrides=(*overrides, "trainer.num_minibatches=2")).algorithm
    assert algorithm == PPOConfig(critic=CriticConfig(value_clip=0.1))


def test_counts_end_where_messages_can_hold_them(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    load_config(path, overrides=[f"trainer.num_steps={2**53}"])
    text = complaint(path, f"trainer.num_steps={2**53 + 1}")
    assert text == "trainer.num_steps: expected `int` <= 9007199254740992"
    for key in ("rollout.num_workers", "trainer.num_ranks"):
        assert complaint(path, f"{key}=40000") == f"{key}: expected `int` <= 4096"


@pytest.mark.parametrize(
    ("kind", "num_survivors"), [("grpo", 2), ("rloo", 2), ("reinforce_plus_plus", 1), ("ppo", 1)]
)
def test_a_group_needs_two_survivors_where_they_are_each_others_baseline(
    tmp_path: Path, kind: str, num_survivors: int
) -> None:
    config = load_config(write_pipeline(tmp_path), overrides=[f"algorithm.type={kind}"])
    assert config.spec().min_group_size == num_survivors


@pytest.mark.parametrize("kind", ["ppo", "reinforce_plus_plus"])
def test_dynamic_sampling_is_refused_where_equal_rewards_teach(tmp_path: Path, kind: str) -> None:
    overrides = (f"algorithm.type={kind}", "trainer.dynamic_sampling.max_batches=2")
    text = complaint(write_pipeline(tmp_path), *overrides)
    assert text.startswith("trainer.dynamic_sampling filters groups with equal rewards")


def test_a_delay_of_an_environment_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    text = complaint(path, "task.turn_delay_s=0.5")
    assert text.startswith("task.turn_delay_s")
    assert "with task.num_turns = 1" in text
    load_config(path, overrides=["task.turn_delay_s=0.5", "task.num_turns=2"])


def test_all_turns_and_what_is_said_between_them_have_room_in_the_model(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    turns = ["task.num_turns=3", "rollout.sampling.max_new_tokens=20", "task.max_digits=8"]
    needed = 9 + 3 * 20 + 2 * 9  # prompt, turns, marks
    load_config(path, overrides=[*turns, f"model.max_position_embeddings={needed}"])
    text = complaint(path, *turns, f"model.max_position_embeddings={needed - 1}")
    assert "has 9 tokens, which leaves no room for the 78 tokens of 3 turns" in text


@pytest.mark.parametrize("kind", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_dynamic_sampling_goes_with_a_baseline_of_the_group(tmp_path: Path, kind: str) -> None:
    overrides = (f"algorithm.type={kind}", "trainer.dynamic_sampling.max_batches=2")
    config = load_config(write_pipeline(tmp_path), overrides=overrides)
    assert config.spec().dynamic_sampling is not None


def test_an_algorithm_that_is_not_chosen_is_grpo(tmp_path: Path) -> None:
    config = load_config(write_pipeline(tmp_path), overrides=["algorithm.group_size=4"])
    assert config.algorithm == GRPOConfig(group_size=4)


def test_stale_samples_are_trained_with_a_correction_only(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    for eta, bound in ((0, None), (0, 0), (2, 0)):
        numbers = [f"mode.max_staleness={eta}"]
        numbers += [] if bound is None else [f"mode.sample_bound={bound}"]
        load_config(path, overrides=["mode.type=async", *numbers])
    for numbers in (["mode.max_staleness=1"], ["mode.max_staleness=2", "mode.sample_bound=1"]):
        with pytest.raises(ValueError, match=r"biased without algorithm\.correction"):
            load_config(path, overrides=["mode.type=async", *numbers])


def test_what_check_prints_resolves_to_the_same_config(tmp_path: Path) -> None:
    for override in (
        "trainer.num_minibatches=2",
        "algorithm.kl={coefficient = 0.1}",
        "algorithm.type=ppo",
        "algorithm.type=rloo",
        "algorithm.overlong.buffer_tokens=3",
        'algorithm.correction={type = "truncate", level = "sequence"}',
    ):
        config = load_config(write_pipeline(tmp_path), overrides=[override])
        printed = tmp_path / "printed.toml"
        printed.write_text(to_toml(config))
        assert load_config(printed) == config


def test_the_json_holds_every_key(tmp_path: Path) -> None:
    data = json.loads(to_json(load_config(write_pipeline(tmp_path))))
    assert data["algorithm"]["loss"]["clip_low"] == 0.2
    assert data["algorithm"]["kl"] is None
    assert data["model"]["type"] == "init"


def test_relative_paths_are_seen_from_the_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint")
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}=", "answer": str(i)}) + "\n" for i in range(50))
    )
    overrides = (
        'model={type = "path", path = "checkpoint"}',
        'task={type = "jsonl", path = "data.jsonl", reward = "exact"}',
    )
    config = load_config(write_pipeline(tmp_path), overrides=overrides)
    assert config.model == PathModelConfig(path=str(tmp_path / "checkpoint"))
    assert isinstance(config.task, JsonlTaskConfig)
    assert config.task.path == str(tmp_path / "data.jsonl")


def test_a_malformed_jsonl_line_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n{"prompt": \n')
    override = 'task={type = "jsonl", path = "data.jsonl", reward = "exact"}'
    text = complaint(write_pipeline(tmp_path), override)
    assert text.startswith("task: ")
    assert "data.jsonl" in text
    assert "2" in text.rpartition("data.jsonl")[2]


def test_a_checkpoint_that_can_not_be_used_is_refused(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    folder = tmp_path / "checkpoint"
    override = 'model={type = "path", path = "checkpoint"}'
    assert "is no folder" in complaint(path, override)

    write_checkpoint(folder, model_type="mamba")
    assert "model_type 'mamba' is not supported; one of qwen3, llama" in complaint(path, override)

    write_checkpoint(folder, vocab_size=4)
    assert "the tokenizer does not match the model: token id 4" in complaint(path, override)

    write_checkpoint(folder)
    write_safetensors(folder / "model.safetensors", num_missing_bytes=1)
    assert "model.safetensors is corrupt" in complaint(path, override)
    (folder / "model.safetensors").unlink()
    assert "holds no model.safetensors" in complaint(path, override)

    write_checkpoint(folder)
    (folder / "tokenizer.json").write_text("{")
    assert "tokenizer.json is corrupt" in complaint(path, override)
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json is missing" in complaint(path, override)


def test_a_tokenizer_that_does_not_know_the_prompts_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", unknown="no token")
    text = complaint(write_pipeline(tmp_path), 'model={type = "path", path = "checkpoint"}')
    assert text.startswith("task: the prompt of training problem 0 has no tokens")
    assert "use a model whose tokenizer knows these characters" in text


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i:040d}", "answer": str(i)}) + "\n" for i in range(50))
    )
    overrides = (
        'task={type = "jsonl", path = "data.jsonl", reward = "exact"}',
        "model.max_position_embeddings=32",
        "rollout.sampling.max_new_tokens=8",
    )
    text = complaint(write_pipeline(tmp_path), *overrides)
    assert "has 40 tokens, which leaves no room for an answer" in text
    assert "model.max_position_embeddings allows 32 positions" in text


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    override = 'model={type = "path", path = "checkpoint"}'
    text = complaint(write_pipeline(tmp_path), override)
    assert "model-00001-of-00001.safetensors: No such file" in text


def test_trackers_are_switched_on_beside_what_the_file_says(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path)
    assert load_config(path).tracking is None
    both = load_config(path, trackers=["tensorboard", "wandb"]).tracking
    assert both == TrackingConfig(tensorboard=True, wandb=WandbConfig(project="jigsawrl"))
    path.write_text(path.read_text() + '\n[tracking.wandb]\nproject = "mine"\n')
    kept = load_config(path, trackers=["wandb"]).tracking
    assert kept == TrackingConfig(wandb=WandbConfig(project="mine"))
    with pytest.raises(ConfigError, match=r"tracking: expected a table"):
        load_config(path, overrides=["tracking=1"], trackers=["wandb"])
    with pytest.raises(ConfigError, match=r"tracking\.tensorbord: unknown key; did you mean"):
        load_config(path, overrides=["tracking.tensorbord=true"])


def test_a_tracker_whose_package_is_missing_is_refused_by_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_pipeline(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    load_config(path, trackers=["tensorboard"])
    with pytest.raises(ConfigError) as caught:
        load_config(path, trackers=["wandb"])
    assert str(caught.value) == (
        f"{path}: tracking.wandb: wandb is missing: pip install 'jigsawrl[tracking]'"
    )
