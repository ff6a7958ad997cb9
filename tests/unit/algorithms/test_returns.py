"""Returns, generalised advantages, the critic's loss, and rewards shaped by length."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.algorithms.returns import discounted_returns, gae
from jigsawrl.algorithms.shaping import overlong_penalty
from jigsawrl.algorithms.values import clipped_value_loss

VALUES = st.lists(st.floats(-3, 3), min_size=1, max_size=8)
SHARES = st.floats(0, 1)


def test_returns_are_discounted_from_the_last_token() -> None:
    assert discounted_returns(2.0, num_tokens=3, gamma=0.5).tolist() == [0.5, 1.0, 2.0]
    assert discounted_returns(2.0, num_tokens=0, gamma=0.5).tolist() == []


@given(values=VALUES, reward=st.floats(-3, 3), gamma=SHARES, gae_lambda=SHARES)
def test_advantages_are_the_weighted_sum_of_all_later_errors(
    values: list[float], reward: float, gamma: float, gae_lambda: float
) -> None:
    last = len(values) - 1
    following = [*values[1:], 0.0]
    errors = [
        (reward if t == last else 0.0) + gamma * following[t] - values[t]
        for t in range(len(values))
    ]
    expected = [
        sum((gamma * gae_lambda) ** k * error for k, error in enumerate(errors[t:]))
        for t in range(len(values))
    ]
    found = gae(
        reward,
        values_T=torch.tensor(values, dtype=torch.float64),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_with_lambda_one_the_values_are_a_mere_baseline() -> None:
    values = torch.tensor([0.3, -0.2, 0.9])
    found = gae(2.0, values_T=values, gamma=0.5, gae_lambda=1.0)
    returns = discounted_returns(2.0, num_tokens=3, gamma=0.5)
    torch.testing.assert_close(found + values, returns)


def test_no_tokens_have_no_advantages() -> None:
    assert gae(1.0, values_T=torch.empty(0), gamma=1.0, gae_lambda=1.0).shape == (0,)


@pytest.mark.parametrize(
    ("value", "target", "loss", "gradient", "clipped"),
    [
        (1.3, 2.0, 0.245, -0.7, False),
        (1.8, 2.0, 0.125, 0.0, True),  # held at 1.5, though 1.8 is nearer
        (1.8, 1.0, 0.32, 0.8, False),  # moved away: the larger error counts
        (0.2, 0.0, 0.125, 0.0, True),
    ],
)
def test_a_value_gains_nothing_beyond_the_clip(
    value: float, target: float, loss: float, gradient: float, clipped: bool
) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    result = clipped_value_loss(
        values,
        old_values_N=torch.ones(1, dtype=torch.float64),
        returns_N=torch.tensor([target], dtype=torch.float64),
        clip=0.5,
    )
    result.loss_N.sum().backward()  # type: ignore[no-untyped-call]
    assert float(result.loss_N.detach()) == pytest.approx(loss, rel=1e-12)
    assert float(values.grad) == pytest.approx(gradient, rel=1e-12)  # type: ignore[arg-type]
    assert bool(result.clipped_N) is clipped


@pytest.mark.parametrize(("num_tokens", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.5), (16, -2.0)])
def test_the_overlong_punishment_falls_linearly_over_the_buffer(
    num_tokens: int, penalty: float
) -> None:
    found = overlong_penalty(num_tokens, max_tokens=16, buffer_tokens=4, factor=2.0)
    assert found == pytest.approx(penalty, abs=0)
