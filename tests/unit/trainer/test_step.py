"""Loss and gradient of the step against the formula, written plainly: one sequence at a time, without
padding, without micro-batches, without FSDP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jigsawrl.algorithms.logprobs import Filter
from jigsawrl.config_algorithm import GRPOConfig, KLConfig, PPOClipConfig
from services.trainer.batch import Sample
from services.trainer.parallel import Gang, full, shard
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError, Step, StepSettings

MakeModel = Callable[..., Any]
L = 16
SETTINGS = StepSettings(
    algorithm=GRPOConfig(),
    sampling=Filter(temperature=0.8),
    max_new_tokens=L,
    max_microbatch_tokens=64,
    num_minibatches=1,
    max_grad_norm=1e9,
)
KL = KLConfig(coefficient=0.3)


def logprobs_of(model: Any, sample: Sample, temperature: float) -> Tensor:
    logits = model(input_ids=sample.tokens[None]).logits[0, :-1] / temperature
    chosen = logits.log_softmax(-1).gather(1, sample.tokens[1:, None])[:, 0]
    return chosen[sample.mask[1:]]


def reference_loss(
    policy: Any,
    samples: Sequence[Sample],
    config: GRPOConfig,
    *,
    reference: Any = None,
    proximal: Any = None,
    temperature: float = 0.8,
) -> Tensor:
    """The formulas of GRPO, term by term."""
    all_rewards = torch.tensor([s.reward for s in samples], dtype=torch.float64)
    num_tokens = sum(int(s.mask.sum()) for s in samples)
    num_sequences = sum(int(s.mask.any()) for s in samples)
    num_prompts = len({s.group for s in samples if s.mask.any()})
    loss: Any = 0.0
    for sample in samples:
        n = int(sample.mask.sum())
        if n == 0:
            continue
        rewards = torch.tensor(
            [s.reward for s in samples if s.group == sample.group], dtype=torch.float64
        )
        advantage = sample.reward - rewards.mean()
        if config.normalization == "group_std":
            advantage = advantage / (rewards.std() + 1e-6)
        if config.normalization == "batch_std":
            advantage = advantage / (all_rewards.std() + 1e-6)
        logprobs = logprobs_of(policy, sample, temperature)
        with torch.no_grad():
            old = logprobs_of(proximal or policy, sample, temperature)
        ratio = (logprobs - old).exp()
        clipped = ratio.clamp(1 - config.loss.clip_low, 1 + config.loss.clip_high)
        losses = torch.maximum(-advantage * ratio, -advantage * clipped)
        if config.kl is not None:
            with torch.no_grad():
                d_from = logprobs_of(reference, sample, temperature)
            d = logprobs - d_from
            kl = {"k1": d, "k2": d * d / 2, "k3": (-d).exp() + d - 1}[config.kl.estimator]
            losses = losses + config.kl.coefficient * kl
        prompt_tokens = sum(int(s.mask.sum()) for s in samples if s.group == sample.group)
        divisor = {
            "token_mean": num_tokens,
            "token_sum": 1,
            "seq_mean_token_sum": num_sequences,
            "prompt_mean": prompt_tokens * num_prompts,
            "seq_mean_token_mean": n * num_sequences,
            "seq_mean_token_sum_norm": L * num_sequences,
        }[config.aggregation]
        loss = loss + losses.sum() / divisor
    assert isinstance(loss, Tensor)
    return loss


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: full(p.grad).clone() for name, p in model.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest entry of each tensor."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= tolerance * float(tensor.abs().max()), name


def step_of(
    samples: Sequence[Sample], policy: Any, gang: Gang, reference: Any = None, **changes: Any
) -> Step:
    return Step(
        samples,
        policy=policy,
        reference=reference,
        gang=gang,
        settings=replace(SETTINGS, **changes),
        version=0,
        spans=Spans(),
    )


def gradient_of_step(
    samples: Sequence[Sample], policy: Any, gang: Gang, reference: Any = None, **changes: Any
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients) of one update that changes nothing."""
    frozen = torch.optim.SGD(policy.parameters(), lr=0.0)
    kept: dict[str, Tensor] = {}
    frozen.register_step_pre_hook(lambda *_: kept.update(gradients(policy)))
    metrics = step_of(samples, policy, gang, reference, **changes).train(frozen)
    return metrics["loss"], kept


@pytest.mark.parametrize(
    ("aggregation", "normalization"),
    [
        *product(
            ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"],
            ["group_std", "batch_std", "mean_only"],
        ),
        *product(["token_sum", "seq_mean_token_sum", "prompt_mean"], ["group_std"]),
    ],
)
def test_loss_and_gradient_equal_the_formula_for_every_split(
    samples: list[Sample],
    make_model: MakeModel,
    gang: Gang,
    aggregation: Any,
    normalization: Any,
) -> None:
    algorithm = GRPOConfig(aggregation=aggregation, normalization=normalization)
    plain = make_model()
    expected_loss = reference_loss(plain, samples, algorithm)
    expected_loss.backward()  # type: ignore[no-untyped-call]
    sharded = shard(make_model(), gang, dtype="float32")
    for max_tokens in (1, 20, 45, 10_000):
        loss, found = gradient_of_step(
            samples, sharded, gang, algorithm=algorithm, max_microbatch_tokens=max_tokens
        )
        assert loss == pytest.approx(float(expected_loss.detach()), rel=1e-10, abs=1e-14)
        assert_close(found, gradients(plain), 1e-10)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_penalty_equals_the_formula(
    samples: list[Sample], make_model: MakeModel, gang: Gang, estimator: Any
) -> None:
    algorithm = GRPOConfig(kl=msgspec.structs.replace(KL, estimator=estimator))
    # Near the policy: far away, k3 meets its bound, which the plain formula has not.
    reference = nudged(make_model(), 0.01)
    plain = make_model()
    expected = reference_loss(plain, samples, algorithm, reference=reference)
    expected.backward()  # type: ignore[no-untyped-call]
    loss, found = gradient_of_step(
        samples, make_model(), gang, reference, algorithm=algorithm, max_microbatch_tokens=30
    )
    assert loss == pytest.approx(float(expected.detach()), rel=1e-10)
    assert_close(found, gradients(plain), 1e-10)


def nudged(model: Any, size: float) -> Any:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(size * noise.to(parameter.dtype))
    return model


def test_in_float32_they_agree_to_rounding(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    plain = make_model(dtype=torch.float32)
    expected = reference_loss(plain, samples, GRPOConfig())
    expected.backward()  # type: ignore[no-untyped-call]
    sharded = shard(make_model(dtype=torch.float32), gang, dtype="float32")
    for max_tokens in (20, 10_000):
        loss, found = gradient_of_step(samples, sharded, gang, max_microbatch_tokens=max_tokens)
        assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
        assert_close(found, gradients(plain), 1e-5)


def test_later_minibatches_are_clipped_against_the_start_of_the_step(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    algorithm = GRPOConfig(loss=PPOClipConfig(clip_low=0.05, clip_high=0.1))
    plain, start = make_model(), make_model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    groups = list(dict.fromkeys(s.group for s in samples))
    for part in (groups[:3], groups[3:]):  # five groups in two mini-batches
        minibatch = [s for s in samples if s.group in part]
        optimizer.zero_grad()
        loss = whole_batch_advantages(plain, minibatch, algorithm, proximal=start)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    policy = make_model()
    step = step_of(samples, policy, gang, algorithm=algorithm, num_minibatches=2)
    metrics = step.train(torch.optim.SGD(policy.parameters(), lr=0.05))
    assert metrics["clip_fraction"] > 0
    assert_close(
        {n: p.detach() for n, p in policy.named_parameters()},
        {n: p.detach() for n, p in plain.named_parameters()},
        1e-10,
    )


def whole_batch_advantages(
    plain: Any, minibatch: list[Sample], algorithm: GRPOConfig, *, proximal: Any
) -> Tensor:
    # Advantages are of groups, and no group is split: those of the mini-batch are the batch's.
    assert algorithm.normalization == "group_std"
    return reference_loss(plain, minibatch, algorithm, proximal=proximal)


@given(
    max_tokens=st.integers(1, 300),
    order=st.permutations(range(5)),
    aggregation=st.sampled_from(["token_mean", "seq_mean_token_mean", "prompt_mean", "token_sum"]),
)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_neither_split_nor_order_nor_padding_changes_the_gradient(
    samples: list[Sample],
    make_model: MakeModel,
    gang: Gang,
    max_tokens: int,
    order: list[int],
    aggregation: Any,
) -> None:
    algorithm = GRPOConfig(aggregation=aggregation)
    model = make_model()
    expected_loss, expected = gradient_of_step(
        samples, model, gang, algorithm=algorithm, max_microbatch_tokens=10_000
    )
    shuffled = [s for g in order for s in samples if s.group == f"g{g}"]
    loss, found = gradient_of_step(
        shuffled, model, gang, algorithm=algorithm, max_microbatch_tokens=max_tokens
    )
    assert loss == pytest.approx(expected_loss, rel=1e-10, abs=1e-14)
    assert_close(found, expected, 1e-10)


def test_a_loss_that_is_not_finite_changes_no_weight(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    policy = make_model()
    broken = [replace(samples[0], reward=float("inf")), *samples[1:]]
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    with pytest.raises(NotFiniteError):
        step_of(broken, policy, gang).train(torch.optim.AdamW(policy.parameters()))
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())


def test_the_gap_is_the_distance_from_what_was_sampled(
    samples: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    policy = make_model(dtype=torch.float32)
    fresh = []
    for sample in samples:
        # As an engine would report them: from generation one token at a time, with a KV cache.
        logprobs, cache = [0.0], None
        with torch.no_grad():
            for t in range(len(sample.tokens) - 1):
                out = policy(
                    input_ids=sample.tokens[None, t : t + 1], past_key_values=cache, use_cache=True
                )
                cache = out.past_key_values
                chances = (out.logits[0, -1] / 0.8).log_softmax(-1)
                logprobs.append(float(chances[sample.tokens[t + 1]]))
        fresh.append(replace(sample, logprobs=torch.tensor(logprobs)))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    metrics = step_of(fresh, policy, gang).train(optimizer)
    assert metrics["logprob_gap_max"] < 1e-4
    off = [replace(s, logprobs=s.logprobs - 0.25) for s in fresh]
    metrics = step_of(off, make_model(dtype=torch.float32), gang).train(optimizer)
    assert metrics["logprob_gap_mean"] == pytest.approx(0.25, abs=1e-4)
