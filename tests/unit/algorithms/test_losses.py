"""The clipped surrogate, the KL estimators and the weights of tokens."""

from __future__ import annotations

import math

import pytest
import torch

from jigsawrl.algorithms.aggregation import (
    Aggregation,
    Denominators,
    token_weights,
    weighted_sum,
)
from jigsawrl.algorithms.kl import Estimator, kl_estimate
from jigsawrl.algorithms.losses import clipped_surrogate, sequence_surrogate, weighted_reinforce


def surrogate_of(
    ratio: float, advantage: float, dual_clip: float | None = None
) -> tuple[float, float, bool]:
    """(loss, gradient, clipped) of one token, clipped to [0.8, 1.3]."""
    logprobs = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = clipped_surrogate(
        logprobs,
        proximal_N=torch.zeros(1, dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
        dual_clip=dual_clip,
    )
    result.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    return float(result.loss_N.detach()), float(logprobs.grad), bool(result.clipped_N)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),
        (1.25, 2.0, -2.5, -2.5, False),  # above 1.2, below the higher bound
        (1.5, 2.0, -2.6, 0.0, True),
        (0.5, 2.0, -1.0, -1.0, False),  # clipping never hides that a good token became rarer
        (0.5, -2.0, 1.6, 0.0, True),
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_the_surrogate_is_clipped_on_the_side_that_gains(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    assert surrogate_of(ratio, advantage) == pytest.approx((loss, gradient, clipped), rel=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (2.5, -2.0, 5.0, 5.0, False),
        (4.0, -2.0, 6.0, 0.0, True),  # 3 |A| instead of 8
        (4.0, 2.0, -2.6, 0.0, True),  # the upper bound of the ratio, not of the loss
        (0.5, -2.0, 1.6, 0.0, True),
    ],
)
def test_a_dual_clip_bounds_the_loss_of_bad_tokens_only(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool
) -> None:
    found = surrogate_of(ratio, advantage, dual_clip=3.0)
    assert found == pytest.approx((loss, gradient, clipped), rel=1e-12)


def test_a_sequence_ratio_is_the_geometric_mean_and_each_token_has_its_share() -> None:
    log_ratios = [0.3, -0.1, 0.1, 0.02]  # three tokens, none, one
    logprobs = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    advantages = [2.0, 2.0, 2.0, -1.0]
    result = sequence_surrogate(
        logprobs,
        proximal_N=torch.zeros(4, dtype=torch.float64),
        advantages_N=torch.tensor(advantages, dtype=torch.float64),
        lengths_B=[3, 0, 1],
        clip_low=0.01,
        clip_high=0.2,
    )
    result.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    first, last = math.exp(0.1), math.exp(0.02)
    expected = [-2 * first] * 3 + [last]
    assert result.loss_N.tolist() == pytest.approx(expected, rel=1e-12)
    assert logprobs.grad is not None
    # Of a sequence of n tokens the mean of these is the gradient of -A s: each is -A s, over n.
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-12)
    assert result.ratio_N.tolist() == pytest.approx([first] * 3 + [last], rel=1e-12)
    assert not result.clipped_N.any()


def test_a_clipped_sequence_has_no_gradient_at_all() -> None:
    logprobs = torch.tensor([0.5, -0.1], dtype=torch.float64, requires_grad=True)
    result = sequence_surrogate(
        logprobs,
        proximal_N=torch.zeros(2, dtype=torch.float64),
        advantages_N=torch.ones(2, dtype=torch.float64),
        lengths_B=[2],
        clip_low=0.1,
        clip_high=0.1,
    )
    result.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    assert result.loss_N.tolist() == pytest.approx([-1.1, -1.1])
    assert result.clipped_N.all()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_an_empty_micro_batch_has_no_loss() -> None:
    empty = torch.empty(0, dtype=torch.float64)
    result = sequence_surrogate(
        empty, proximal_N=empty, advantages_N=empty, lengths_B=[], clip_low=0.1, clip_high=0.1
    )
    assert result.loss_N.shape == (0,)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight", "clipped"),
    [(1.1, 2.0, 1.1, False), (1.5, 2.0, 1.3, True), (0.5, -2.0, 0.8, True), (0.9, 2.0, 0.9, False)],
)
def test_a_clipped_weight_keeps_the_gradient(
    ratio: float, advantage: float, weight: float, clipped: bool
) -> None:
    start = -2.0
    logprobs = torch.tensor([start + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    result = weighted_reinforce(
        logprobs,
        proximal_N=torch.tensor([start], dtype=torch.float64),
        advantages_N=torch.tensor([advantage], dtype=torch.float64),
        clip_low=0.2,
        clip_high=0.3,
    )
    result.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    loss = -weight * advantage * (start + math.log(ratio))
    assert float(result.loss_N.detach()) == pytest.approx(loss, rel=1e-12)
    assert float(logprobs.grad) == pytest.approx(-weight * advantage, rel=1e-12)  # type: ignore[arg-type]
    assert bool(result.clipped_N) is clipped


def test_a_huge_log_ratio_stays_finite() -> None:
    loss, gradient, _ = surrogate_of(math.exp(300), -1.0)
    assert loss == pytest.approx(math.exp(20))
    assert gradient == 0.0


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
    ],
)
def test_each_estimator_is_differentiated_as_written(
    estimator: Estimator, value: float, gradient: float
) -> None:
    logprobs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    kl = kl_estimate(logprobs, reference_N=reference, estimator=estimator)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert float(kl.detach()) == pytest.approx(value, rel=1e-12)
    assert float(logprobs.grad) == pytest.approx(gradient, rel=1e-12)  # type: ignore[arg-type]
    assert reference.grad is None


def test_k3_is_bounded() -> None:
    far = kl_estimate(torch.tensor([-50.0]), reference_N=torch.tensor([0.0]), estimator="k3")
    assert float(far) == 10.0


MASK = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
COUNTS = Denominators(num_tokens=4, num_sequences=2, num_prompts=2, max_new_tokens=8)


@pytest.mark.parametrize(
    ("aggregation", "first", "second"),
    [
        ("token_mean", 1 / 4, 1 / 4),
        ("token_sum", 1, 1),
        ("seq_mean_token_sum", 1 / 2, 1 / 2),
        ("prompt_mean", 1 / 12, 1 / 2),
        ("seq_mean_token_mean", 1 / 6, 1 / 2),
        ("seq_mean_token_sum_norm", 1 / 16, 1 / 16),
    ],
)
def test_weights_follow_the_formula(aggregation: Aggregation, first: float, second: float) -> None:
    weights = token_weights(
        MASK,
        aggregation=aggregation,
        denominators=COUNTS,
        # The first has a sibling with three tokens in another micro-batch.
        prompt_tokens_B=torch.tensor([6, 1, 0]),
    )
    expected = torch.tensor(
        [[0, first, first, first], [0, 0, second, 0], [0, 0, 0, 0]], dtype=torch.float64
    )
    torch.testing.assert_close(weights, expected, rtol=1e-15, atol=0)


def test_what_is_masked_can_not_spoil_the_sum() -> None:
    values = torch.tensor([1.0, float("nan")], requires_grad=True)
    total = weighted_sum(values, weights=torch.tensor([0.5, 0.0]))
    total.backward()  # type: ignore[no-untyped-call]
    assert float(total.detach()) == 0.5
    assert values.grad is not None
    assert values.grad.tolist() == [0.5, 0.0]
