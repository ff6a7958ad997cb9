"""Every policy loss, correction and estimator in a step, against plain loops over single sequences: no
padding, no micro-batches, no vectors. Samples are stale: other versions, other log-probs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jigsawrl.config_algorithm import (
    AlgorithmConfig,
    CISPOConfig,
    GRPOConfig,
    GSPOConfig,
    IcePopConfig,
    KLConfig,
    PPOClipConfig,
    ReinforcePlusPlusBaselineConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
    SequenceMaskConfig,
    TruncateConfig,
)
from services.trainer.batch import Sample
from services.trainer.parallel import Gang, shard
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError, Step
from tests.unit.trainer.test_step import (
    SETTINGS,
    MakeModel,
    assert_close,
    gradients,
    logprobs_of,
    nudged,
)

VERSION = 3
"""The step makes version 4; tokens were sampled by versions 0 to 3."""
STALE = dict[str, Any](proximal="loglinear")
ALGORITHMS: dict[str, AlgorithmConfig] = {
    "ppo_clip": GRPOConfig(loss=PPOClipConfig(clip_low=0.05, clip_high=0.1), **STALE),
    "dual_clip": GRPOConfig(loss=PPOClipConfig(dual_clip=1.05), **STALE),
    "gspo": GRPOConfig(
        loss=GSPOConfig(clip_low=0.02, clip_high=0.05), aggregation="seq_mean_token_mean", **STALE
    ),
    "cispo": GRPOConfig(loss=CISPOConfig(clip_low=0.1, clip_high=0.1), **STALE),
    "rloo": RLOOConfig(**STALE),
    "reinforce++": ReinforcePlusPlusConfig(gamma=0.9, **STALE),
    "reinforce++ baseline": ReinforcePlusPlusBaselineConfig(**STALE),
    "recompute": GRPOConfig(correction=TruncateConfig(cap=1.2)),
    "truncate": GRPOConfig(correction=TruncateConfig(cap=1.1), **STALE),
    "truncate sequence": GRPOConfig(correction=TruncateConfig(level="sequence", cap=1.3), **STALE),
    "icepop": GRPOConfig(correction=IcePopConfig(low=0.9, high=1.2), **STALE),
    "geometric": GRPOConfig(
        correction=SequenceMaskConfig(gate="geometric_mean", low=0.95, high=1.1), **STALE
    ),
    "product": GRPOConfig(
        correction=SequenceMaskConfig(gate="product", low=0.7, high=1.5, cap=1.1), **STALE
    ),
    "product with kl": RLOOConfig(
        correction=SequenceMaskConfig(gate="product", low=0.7, high=1.5),
        kl=KLConfig(coefficient=0.3, estimator="k2"),
        aggregation="prompt_mean",
        **STALE,
    ),
}


@pytest.fixture
def stale(samples: list[Sample], make_model: MakeModel) -> list[Sample]:
    generator = torch.Generator().manual_seed(5)
    model = make_model()
    made = []
    for sample in samples:
        logprobs = torch.zeros(len(sample.tokens))
        with torch.no_grad():
            own = logprobs_of(model, sample, 0.8)
        noise = 0.4 * torch.randn(len(own), generator=generator, dtype=torch.float64)
        logprobs[sample.mask] = (own + noise).float()
        versions = torch.randint(0, VERSION + 1, sample.versions.shape, generator=generator).int()
        versions[~sample.mask] = -1
        made.append(replace(sample, logprobs=logprobs, versions=versions))
    return made


def plain_advantages(samples: Sequence[Sample], algorithm: AlgorithmConfig) -> list[list[float]]:
    """Per sample, per loss token."""
    lengths = [int(sample.mask.sum()) for sample in samples]
    result = []
    for sample, length in zip(samples, lengths, strict=True):
        own = [s.reward for s in samples if s.group == sample.group]
        mean = statistics.fmean(own)
        if isinstance(algorithm, ReinforcePlusPlusConfig):
            values = [sample.reward * algorithm.gamma ** (length - 1 - t) for t in range(length)]
        elif isinstance(algorithm, RLOOConfig):
            values = [sample.reward - (sum(own) - sample.reward) / (len(own) - 1)] * length
        elif isinstance(algorithm, ReinforcePlusPlusBaselineConfig):
            values = [sample.reward - mean] * length
        else:
            values = [(sample.reward - mean) / (statistics.stdev(own) + 1e-6)] * length
        result.append(values)
    if isinstance(algorithm, ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig):
        tokens = [value for values in result for value in values]
        mean, scale = statistics.fmean(tokens), (statistics.variance(tokens) + 1e-8) ** -0.5
        result = [[(value - mean) * scale for value in values] for values in result]
    return result


def plain_weights(algorithm: AlgorithmConfig, log_weights: list[float]) -> list[float]:
    """What multiplies the loss of each token of one sequence."""
    correction = algorithm.correction
    weights = [math.exp(value) for value in log_weights]
    if correction is None:
        return [1.0] * len(weights)
    if isinstance(correction, TruncateConfig):
        if correction.level == "sequence":
            weights = [math.prod(weights)] * len(weights)
        return [min(weight, correction.cap) for weight in weights]
    if isinstance(correction, IcePopConfig):
        return [w if correction.low <= w <= correction.high else 0.0 for w in weights]
    gate = math.prod(weights)
    if correction.gate == "geometric_mean":
        gate = gate ** (1 / len(weights))
    if not correction.low <= gate <= correction.high:
        return [0.0] * len(weights)
    return [min(weight, correction.cap or math.inf) for weight in weights]


def plain_token_loss(
    algorithm: AlgorithmConfig, logprob: Tensor, ratio: Tensor, advantage: float
) -> Tensor:
    loss = algorithm.loss
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    bounded = min(max(float(ratio.detach()), low), high)
    if isinstance(loss, CISPOConfig):
        return -bounded * advantage * logprob
    worse = -advantage * ratio
    if -advantage * bounded > float(worse.detach()):
        worse = torch.tensor(-advantage * bounded, dtype=torch.float64)
    if isinstance(loss, PPOClipConfig) and loss.dual_clip is not None and advantage < 0:
        worse = torch.minimum(worse, torch.tensor(-loss.dual_clip * advantage, dtype=torch.float64))
    return worse


def plain_loss(
    policy: Any, samples: Sequence[Sample], algorithm: AlgorithmConfig, reference: Any
) -> Tensor:
    counts = [int(sample.mask.sum()) for sample in samples]
    num_sequences = sum(count > 0 for count in counts)
    num_prompts = len({s.group for s in samples if s.mask.any()})
    total = torch.zeros((), dtype=torch.float64)
    advantages = plain_advantages(samples, algorithm)
    for index, sample in enumerate(samples):
        if not counts[index]:
            continue
        logprobs = logprobs_of(policy, sample, 0.8)
        own = logprobs.detach().tolist()
        behaviour = sample.logprobs[sample.mask].double().tolist()
        proximal = own
        if algorithm.proximal == "loglinear":
            versions = sample.versions[sample.mask].tolist()
            alphas = [(VERSION - v) / (VERSION + 1 - v) for v in versions]
            proximal = [b + a * (o - b) for a, b, o in zip(alphas, behaviour, own, strict=True)]
        log_weights = [p - b for p, b in zip(proximal, behaviour, strict=True)]
        weights = plain_weights(algorithm, log_weights)
        log_ratios = [logprobs[t] - proximal[t] for t in range(len(own))]
        if isinstance(algorithm.loss, GSPOConfig):
            # The sequence form: the mean over tokens of one and the same ratio.
            log_ratios = [torch.stack(log_ratios).mean()] * len(own)
        prompt = sum(c for c, s in zip(counts, samples, strict=True) if s.group == sample.group)
        divisor = {
            "token_mean": sum(counts),
            "seq_mean_token_mean": counts[index] * num_sequences,
            "prompt_mean": prompt * num_prompts,
        }[algorithm.aggregation]
        for t, advantage in enumerate(advantages[index]):
            token = plain_token_loss(algorithm, logprobs[t], log_ratios[t].exp(), advantage)
            total = total + weights[t] * token / divisor
        if algorithm.kl is not None:
            with torch.no_grad():
                distance = logprobs_of(reference, sample, 0.8)
            kl = ((logprobs - distance) ** 2 / 2).sum() / divisor
            total = total + algorithm.kl.coefficient * kl
    return total


def gradient_of_step(
    samples: Sequence[Sample], policy: Any, gang: Gang, algorithm: AlgorithmConfig, **changes: Any
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """(metrics, gradients) of one update that changes nothing."""
    frozen = torch.optim.SGD(policy.parameters(), lr=0.0)
    kept: dict[str, Tensor] = {}
    frozen.register_step_pre_hook(lambda *_: kept.update(gradients(policy)))
    reference = changes.pop("reference", None)
    step = Step(
        samples,
        policy=policy,
        reference=reference,
        gang=gang,
        settings=replace(SETTINGS, algorithm=algorithm, **changes),
        version=VERSION,
        spans=Spans(),
    )
    return step.train(frozen), kept


@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_plain_loops_for_every_split(
    name: str, stale: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    algorithm = ALGORITHMS[name]
    reference = nudged(make_model(), 0.01) if algorithm.kl else None
    plain = make_model()
    expected = plain_loss(plain, stale, algorithm, reference)
    expected.backward()  # type: ignore[no-untyped-call]
    sharded = shard(make_model(), gang, dtype="float32")
    for max_tokens in (1, 40, 10_000):
        metrics, found = gradient_of_step(
            stale,
            sharded,
            gang,
            algorithm,
            max_microbatch_tokens=max_tokens,
            reference=reference,
        )
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-9, abs=1e-12)
        assert_close(found, gradients(plain), 1e-9)
    if algorithm.correction is not None:
        assert 0 < metrics["correction_bounded_fraction"] < 1
        assert 0 < metrics["correction_weight_mean"] < 2
    elif name in ("ppo_clip", "dual_clip", "gspo", "cispo"):
        assert 0 < metrics["clip_fraction"] < 1


@given(
    name=st.sampled_from(sorted(ALGORITHMS)),
    max_tokens=st.integers(1, 300),
    order=st.permutations(range(5)),
    inner=st.randoms(use_true_random=False),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_neither_split_nor_order_nor_padding_changes_the_gradient(
    stale: list[Sample],
    make_model: MakeModel,
    gang: Gang,
    name: str,
    max_tokens: int,
    order: list[int],
    inner: Any,
) -> None:
    algorithm = ALGORITHMS[name]
    model = make_model()
    reference = nudged(make_model(), 0.01) if algorithm.kl else None
    whole = dict[str, Any](max_microbatch_tokens=10_000, reference=reference)
    expected_metrics, expected = gradient_of_step(stale, model, gang, algorithm, **whole)
    shuffled = []
    for number in order:
        members = [s for s in stale if s.group == f"g{number}"]
        inner.shuffle(members)
        shuffled += members
    split = whole | {"max_microbatch_tokens": max_tokens}
    metrics, found = gradient_of_step(shuffled, model, gang, algorithm, **split)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9, abs=1e-12)
    assert_close(found, expected, 1e-9)


def test_what_a_correction_leaves_out_stays_in_the_denominator(
    stale: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    # Groups 0 and 1 alone are near enough to be kept: the loss is theirs, over all tokens.
    near = {"g0", "g1"}
    moved = [
        replace(s, logprobs=s.logprobs if s.group in near else s.logprobs - 9.0) for s in stale
    ]
    band = IcePopConfig(low=0.0, high=20.0)
    model = make_model()
    found, _ = gradient_of_step(moved, model, gang, GRPOConfig(correction=band))
    kept = [s for s in moved if s.group in near]
    alone, _ = gradient_of_step(kept, model, gang, GRPOConfig(correction=band))
    share = sum(s.num_loss_tokens for s in kept) / sum(s.num_loss_tokens for s in moved)
    assert found["correction_bounded_fraction"] == pytest.approx(1 - share)
    assert found["loss"] == pytest.approx(alone["loss"] * share)


def test_the_weights_of_later_minibatches_are_those_of_the_start_of_the_step(
    stale: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    policy = make_model()
    weights = []
    with torch.no_grad():
        for sample in stale:
            distance = logprobs_of(policy, sample, 0.8) - sample.logprobs[sample.mask].double()
            weights += [min(math.exp(value), 1.2) for value in distance.tolist()]
    step = Step(
        stale,
        policy=policy,
        reference=None,
        gang=gang,
        settings=replace(SETTINGS, algorithm=ALGORITHMS["recompute"], num_minibatches=3),
        version=VERSION,
        spans=Spans(),
    )
    metrics = step.train(torch.optim.SGD(policy.parameters(), lr=0.05))
    assert metrics["correction_weight_mean"] == pytest.approx(statistics.fmean(weights), rel=1e-9)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_engine_logprob_that_is_not_finite_refuses_the_step(
    name: str, stale: list[Sample], make_model: MakeModel, gang: Gang
) -> None:
    algorithm = ALGORITHMS[name]
    broken = [replace(stale[0], logprobs=stale[0].logprobs + float("nan")), *stale[1:]]
    policy = make_model()
    before = {n: p.detach().clone() for n, p in policy.named_parameters()}
    with pytest.raises(NotFiniteError):
        gradient_of_step(
            broken, policy, gang, algorithm, reference=make_model() if algorithm.kl else None
        )
    assert all(torch.equal(p, before[n]) for n, p in policy.named_parameters())
