"""Rewards to advantages."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.algorithms.advantages import STD_EPSILON, Normalization, group_advantages, whiten

NORMALIZATIONS: list[Normalization] = ["group_std", "batch_std", "mean_only", "leave_one_out"]


def advantages(
    rewards: list[float], groups: list[int], normalization: Normalization
) -> list[float]:
    result: list[float] = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        groups_B=torch.tensor(groups),
        normalization=normalization,
    ).tolist()
    return result


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5, 2.0, 4.0]
    expected = []
    for group in (rewards[:4], rewards[4:]):
        scale = statistics.stdev(group) + STD_EPSILON
        expected += [(reward - statistics.fmean(group)) / scale for reward in group]
    assert advantages(rewards, [0, 0, 0, 0, 1, 1], "group_std") == pytest.approx(
        expected, rel=1e-12
    )


def test_the_batch_deviation_is_that_of_all_rewards() -> None:
    rewards = [1.0, 0.0, 2.0, 4.0]
    scale = statistics.stdev(rewards) + STD_EPSILON
    expected = [0.5 / scale, -0.5 / scale, -1 / scale, 1 / scale]
    assert advantages(rewards, [0, 0, 1, 1], "batch_std") == pytest.approx(expected, rel=1e-12)


def test_mean_only_divides_by_nothing() -> None:
    assert advantages([1.0, 0.0, 2.0, 4.0], [0, 0, 1, 1], "mean_only") == [0.5, -0.5, -1.0, 1.0]


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5, 2.0, 4.0]
    expected = [1 - 0.5 / 3, -1.5 / 3, -1.5 / 3, 0.5 - 1 / 3, -2.0, 2.0]
    found = advantages(rewards, [0, 0, 0, 0, 1, 1], "leave_one_out")
    assert found == pytest.approx(expected, rel=1e-12)


def test_whitened_values_have_mean_zero_and_unbiased_variance_one() -> None:
    values = [3.0, -1.0, 0.5, 0.5, 7.0]
    scale = (statistics.variance(values) + 1e-8) ** -0.5
    expected = [(value - statistics.fmean(values)) * scale for value in values]
    found = whiten(torch.tensor(values, dtype=torch.float64)).tolist()
    assert found == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("values", [[], [2.0], [0.1, 0.1, 0.1]])
def test_nothing_to_prefer_is_whitened_to_exactly_zero(values: list[float]) -> None:
    assert whiten(torch.tensor(values, dtype=torch.float64)).tolist() == [0.0] * len(values)


def test_whitening_over_ranks_is_that_of_the_whole_batch() -> None:
    whole = torch.tensor([3.0, -1.0, 0.5, 0.5, 7.0], dtype=torch.float64)
    other = whole[:2]
    # What the other rank would contribute to each of the two sums, in their order.
    mean = whole.mean()
    sums = iter([torch.tensor([2.0, float(other.sum())]), (other - mean).square().sum()[None]])
    found = whiten(
        whole[2:],
        sum_over_ranks=lambda own: own + next(sums),
        max_over_ranks=lambda own: torch.maximum(own, torch.stack([other.max(), -other.min()])),
    )
    torch.testing.assert_close(found, whiten(whole)[2:], rtol=1e-12, atol=0)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_a_single_survivor_and_equal_rewards_get_exactly_zero(normalization: Normalization) -> None:
    # The mean of three times 0.1 is not 0.1 in floating point.
    assert advantages([3.0, 0.1, 0.1, 0.1], [0, 1, 1, 1], normalization) == [0.0] * 4


@given(
    rewards=st.lists(st.integers(-8, 8), min_size=2, max_size=12),
    normalization=st.sampled_from(NORMALIZATIONS),
    order=st.randoms(use_true_random=False),
)
def test_order_within_the_batch_changes_nothing(
    rewards: list[int], normalization: Normalization, order: st.DataObject
) -> None:
    groups = [i // 3 for i in range(len(rewards))]
    before = advantages([float(r) for r in rewards], groups, normalization)
    places = list(range(len(rewards)))
    order.shuffle(places)  # type: ignore[attr-defined]
    after = advantages(
        [float(rewards[i]) for i in places], [groups[i] for i in places], normalization
    )
    assert after == pytest.approx([before[i] for i in places], abs=1e-12)
