"""PPO with a critic against plain loops, and as the learner runs, stores and resumes it."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jigsawrl.config import PipelineConfig, TrainerConfig
from jigsawrl.config_algorithm import CriticConfig, GRPOConfig, PPOClipConfig, PPOConfig
from jigsawrl.contract.message import Ledger
from services.trainer import checkpoint
from services.trainer.batch import Sample, pack
from services.trainer.critic import Critic, CriticStep, build_critic
from services.trainer.parallel import Gang, full_state, shard
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError, Step
from tests.unit.trainer.test_learner import assert_equal, started, weights
from tests.unit.trainer.test_step import (
    SETTINGS,
    MakeModel,
    assert_close,
    logprobs_of,
    nudged,
)

ALGORITHM = PPOConfig(
    gamma=0.97,
    gae_lambda=0.9,
    loss=PPOClipConfig(clip_low=0.05, clip_high=0.05),
    critic=CriticConfig(value_clip=0.02),
)
RATE = 0.05


def make_critic(make_model: MakeModel) -> Critic:
    """With a head that is not 0, so that values differ."""
    model_config = make_model().config.to_json_string()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        critic = build_critic(model_config, dtype=torch.float64).eval()
    with torch.no_grad():
        critic.model.load_state_dict(make_model(seed=2).model.state_dict())
    nudged(critic.head, 0.3)
    return critic


def values_of(critic: Any, sample: Sample) -> Tensor:
    values: Tensor = critic(sample.tokens[None])[0, :-1][sample.mask[1:]]
    return values


def plain_gae(reward: float, values: list[float]) -> list[float]:
    advantages: list[float] = []
    for t in reversed(range(len(values))):
        last = t == len(values) - 1
        delta = (reward if last else ALGORITHM.gamma * values[t + 1]) - values[t]
        later = 0.0 if last else advantages[0]
        advantages.insert(0, delta + ALGORITHM.gamma * ALGORITHM.gae_lambda * later)
    return advantages


def plain_ppo(
    policy: Any, critic: Any, samples: list[Sample], parts: list[set[str]]
) -> list[float]:
    """Update both models once per part, by loops; the value losses."""
    with torch.no_grad():
        old_values = [values_of(critic, s).tolist() for s in samples]
        proximal = [logprobs_of(policy, s, 0.8) for s in samples]
    raw = [plain_gae(s.reward, v) for s, v in zip(samples, old_values, strict=True)]
    flat = [value for values in raw for value in values]
    mean, scale = statistics.fmean(flat), (statistics.variance(flat) + 1e-8) ** -0.5
    optimizers = [torch.optim.SGD(m.parameters(), lr=RATE) for m in (policy, critic)]
    value_losses = []
    for part in parts:
        chosen = [i for i, s in enumerate(samples) if s.group in part]
        num_tokens = sum(samples[i].num_loss_tokens for i in chosen)
        policy_loss = value_loss = torch.zeros((), dtype=torch.float64)
        for i in chosen:
            logprobs, values = logprobs_of(policy, samples[i], 0.8), values_of(critic, samples[i])
            for t in range(len(raw[i])):
                advantage = (raw[i][t] - mean) * scale
                ratio = (logprobs[t] - proximal[i][t]).exp()
                bounded = ratio.clamp(0.95, 1.05)
                policy_loss = policy_loss - torch.minimum(advantage * ratio, advantage * bounded)
                old, target = old_values[i][t], old_values[i][t] + raw[i][t]
                near = (values[t] - old).clamp(-0.02, 0.02) + old
                error = torch.maximum((values[t] - target) ** 2, (near - target) ** 2)
                value_loss = value_loss + error / 2
        for optimizer, loss in zip(optimizers, (policy_loss, value_loss), strict=True):
            optimizer.zero_grad()
            (loss / num_tokens).backward()
            optimizer.step()
        value_losses.append(float(value_loss.detach()) / num_tokens)
    return value_losses


def train(
    samples: list[Sample],
    policy: Any,
    critic: Any,
    gang: Gang,
    *,
    rate: float = RATE,
    algorithm: PPOConfig = ALGORITHM,
    **changes: Any,
) -> dict[str, float]:
    critic_step = CriticStep(
        samples,
        critic=critic,
        optimizer=torch.optim.SGD(critic.parameters(), lr=rate),
        gang=gang,
        algorithm=algorithm,
        max_grad_norm=1e9,
    )
    step = Step(
        samples,
        policy=policy,
        reference=None,
        gang=gang,
        settings=replace(SETTINGS, algorithm=algorithm, **changes),
        version=0,
        spans=Spans(),
        critic=critic_step,
    )
    return step.train(torch.optim.SGD(policy.parameters(), lr=rate))


def parameters(model: Any) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("max_tokens", [1, 40, 10_000])
def test_two_updates_of_policy_and_critic_equal_the_plain_loops(
    samples: list[Sample], make_model: MakeModel, gang: Gang, max_tokens: int
) -> None:
    plain, plain_critic = make_model(), make_critic(make_model)
    parts = [{"g0", "g1", "g2"}, {"g3", "g4"}]
    value_losses = plain_ppo(plain, plain_critic, samples, parts)
    policy = shard(make_model(), gang, dtype="float32")
    critic = shard(make_critic(make_model), gang, dtype="float32")
    metrics = train(
        samples, policy, critic, gang, num_minibatches=2, max_microbatch_tokens=max_tokens
    )
    assert metrics["value_loss"] == pytest.approx(statistics.fmean(value_losses), rel=1e-9)
    assert metrics["value_clip_fraction"] > 0
    assert metrics["clip_fraction"] > 0
    assert_close(full_state(policy), parameters(plain), 1e-9)
    assert_close(full_state(critic), parameters(plain_critic), 1e-9)


@given(max_tokens=st.integers(1, 300), order=st.permutations(range(5)))
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_neither_split_nor_order_nor_padding_changes_either_gradient(
    samples: list[Sample], make_model: MakeModel, gang: Gang, max_tokens: int, order: list[int]
) -> None:
    shuffled = [s for g in order for s in samples if s.group == f"g{g}"]
    results = []
    for batch, size in ((samples, 10_000), (shuffled, max_tokens)):
        policy, critic = make_model(), make_critic(make_model)
        train(batch, policy, critic, gang, max_microbatch_tokens=size)
        results.append((parameters(policy), parameters(critic)))
    for found, expected in zip(results[1], results[0], strict=True):
        assert_close(found, expected, 1e-9)


def test_what_is_masked_between_two_answers_is_no_step(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    # Two tokens of another speaker in the middle: the value of what follows is carried over them.
    sample = next(s for s in samples if s.num_loss_tokens >= 6)
    mask = sample.mask.clone()
    mask[len(mask) - 4 : len(mask) - 2] = False
    gapped = replace(sample, mask=mask)
    critic = make_critic(make_model)
    step = CriticStep(
        [gapped],
        critic=critic,
        optimizer=torch.optim.SGD(critic.parameters(), lr=0.0),
        gang=gang,
        algorithm=ALGORITHM,
        max_grad_norm=1.0,
    )
    found = step.advantages(pack([gapped], [0], max_tokens=100), lambda: None)[0]
    with torch.no_grad():
        raw = plain_gae(gapped.reward, values_of(critic, gapped).tolist())
    scale = (statistics.variance(raw) + 1e-8) ** -0.5
    expected = [(value - statistics.fmean(raw)) * scale for value in raw]
    assert found.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("broken", ["reward", "critic"])
def test_a_critic_that_is_not_finite_changes_no_weight(
    samples: list[Sample], make_model: MakeModel, gang: Gang, broken: str
) -> None:
    policy, critic = make_model(), make_critic(make_model)
    if broken == "reward":
        samples = [replace(samples[0], reward=float("nan")), *samples[1:]]
    else:
        with torch.no_grad():
            critic.head.bias.fill_(float("inf"))
    before = [{n: p.clone() for n, p in parameters(m).items()} for m in (policy, critic)]
    with pytest.raises(NotFiniteError):
        train(samples, policy, critic, gang)
    for model, kept in zip((policy, critic), before, strict=True):
        assert_equal(parameters(model), kept)


@pytest.fixture
def with_critic(config: PipelineConfig) -> PipelineConfig:
    return msgspec.structs.replace(
        config,
        algorithm=msgspec.structs.replace(ALGORITHM, critic=CriticConfig(learning_rate=1e-2)),
        trainer=TrainerConfig(num_steps=4, num_minibatches=2),
    )


def test_the_step_after_a_restore_is_equal_bit_by_bit(
    with_critic: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    with started(with_critic, tmp_path) as learner:
        first = learner.train(samples, version=0, ledger=Ledger(cursor=5))
        path = learner.commit_checkpoint()
        expected_metrics = learner.train(samples, version=1, ledger=Ledger(cursor=10))
        expected = weights(learner)
        assert not any("head." in name and "lm_head" not in name for name in expected)
        state = checkpoint.read(learner.commit_checkpoint())
    assert first["value_loss"] > 0
    assert checkpoint.read(path).tensors["critic"].keys() == state.tensors["critic"].keys()
    for folder in checkpoint.committed(tmp_path):
        if folder != path:
            (folder / checkpoint.MARKER).unlink()
    with started(with_critic, tmp_path, gang_epoch=2) as learner:
        assert learner.version == 1
        assert learner.train(samples, version=1, ledger=Ledger(cursor=10)) == expected_metrics
        assert_equal(weights(learner), expected)
        again = checkpoint.read(learner.commit_checkpoint())
    for part in ("critic", "critic_optimizer"):
        assert_equal(again.tensors[part], state.tensors[part])


def test_the_critic_starts_from_the_policy_with_values_of_zero(
    with_critic: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    still = msgspec.structs.replace(
        with_critic,
        algorithm=msgspec.structs.replace(ALGORITHM, critic=CriticConfig(learning_rate=0.0)),
    )
    with started(still, tmp_path) as learner:
        policy = weights(learner)
        saved = checkpoint.read(learner.commit_checkpoint()).tensors["critic"]
        metrics = learner.train(samples, version=0, ledger=Ledger(cursor=0))
    assert metrics["value_mean"] == 0.0
    assert metrics["value_grad_norm"] > 0
    backbone = {n: t for n, t in saved.items() if n.startswith("model.")}
    assert_equal(backbone, {n: t for n, t in policy.items() if n.startswith("model.")})
    assert float(saved["head.weight"].abs().max()) == 0.0


def test_in_bfloat16_the_critic_is_trained_in_float32(
    with_critic: PipelineConfig, samples: list[Sample], tmp_path: Path
) -> None:
    half = TrainerConfig(num_steps=4, dtype="bfloat16")
    with started(msgspec.structs.replace(with_critic, trainer=half), tmp_path) as learner:
        metrics = learner.train(samples, version=0, ledger=Ledger(cursor=0))
        saved = checkpoint.read(learner.commit_checkpoint()).tensors["critic"]
    assert metrics["value_grad_norm"] > 0
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def test_a_checkpoint_without_a_critic_is_refused_in_one_line(
    config: PipelineConfig, with_critic: PipelineConfig, tmp_path: Path
) -> None:
    with started(msgspec.structs.replace(config, algorithm=GRPOConfig()), tmp_path) as learner:
        learner.commit_checkpoint()
    with (
        pytest.raises(ValueError, match="has no critic weights") as caught,
        started(with_critic, tmp_path, gang_epoch=2),
    ):
        pass
    assert "\n" not in str(caught.value)


def test_a_critic_learns_to_tell_rewards(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    # One sequence pays, one does not: the error falls to a fraction of what a constant leaves.
    pair = [replace(samples[0], reward=1.0), replace(samples[1], reward=0.0)]
    policy, critic = make_model(), make_critic(make_model)
    algorithm = PPOConfig(critic=CriticConfig(value_clip=10.0))
    losses = []
    for _ in range(40):
        metrics = train(pair, policy, critic, gang, rate=0.01, algorithm=algorithm)
        losses.append(metrics["value_loss"])
    assert losses[-1] < 0.5 * losses[0]
