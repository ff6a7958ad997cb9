"""Weights of what another policy sampled, against the formulas token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from jigsawrl.algorithms.correction import (
    Correction,
    icepop_weights,
    loglinear_proximal,
    sequence_mask_weights,
    truncated_weights,
)

LOG_WEIGHTS = [0.1, -0.2, 1.0, 0.0, -0.5, -0.1]
LENGTHS = [3, 0, 1, 2]
BEHAVIOUR = torch.tensor([-1.0, -2.0, -0.5, -0.1, -3.0, -1.0], dtype=torch.float64)
PROXIMAL = BEHAVIOUR + torch.tensor(LOG_WEIGHTS, dtype=torch.float64)
OWN = [math.exp(value) for value in LOG_WEIGHTS]


def check(found: Correction, weights: list[float], bounded: list[bool]) -> None:
    assert found.weights_N.tolist() == pytest.approx(weights, rel=1e-12)
    assert found.bounded_N.tolist() == bounded
    assert not found.weights_N.requires_grad


def test_a_token_weight_is_cut_at_the_cap() -> None:
    proximal = PROXIMAL.clone().requires_grad_()
    found = truncated_weights(
        proximal, behaviour_N=BEHAVIOUR, lengths_B=LENGTHS, level="token", cap=1.5
    )
    check(found, [OWN[0], OWN[1], 1.5, *OWN[3:]], [False, False, True, False, False, False])


def test_a_sequence_weight_is_the_product_over_its_tokens() -> None:
    found = truncated_weights(
        PROXIMAL, behaviour_N=BEHAVIOUR, lengths_B=LENGTHS, level="sequence", cap=2.0
    )
    # exp(0.9) = 2.46 is cut; exp(0); exp(-0.6).
    check(found, [2.0] * 3 + [1.0] + [math.exp(-0.6)] * 2, [True] * 3 + [False] * 3)


def test_icepop_leaves_out_tokens_outside_the_band_and_changes_no_other() -> None:
    found = icepop_weights(PROXIMAL, behaviour_N=BEHAVIOUR, low=0.7, high=2.0)
    check(found, [OWN[0], OWN[1], 0.0, 1.0, 0.0, OWN[5]], [False, False, True, False, True, False])


@pytest.mark.parametrize(
    ("gate", "low", "high", "kept"),
    [
        ("geometric_mean", 0.8, 1.3, [False, True, False]),  # exp(0.3), 1, exp(-0.3)
        ("geometric_mean", 0.7, 1.4, [True, True, True]),
        ("product", 0.7, 1.4, [False, True, False]),  # exp(0.9), 1, exp(-0.6)
        ("product", 0.5, 2.0, [False, True, True]),
    ],
)
def test_a_sequence_is_kept_or_left_out_as_a_whole(
    gate: Any, low: float, high: float, kept: list[bool]
) -> None:
    tokens = [kept[0]] * 3 + [kept[1]] + [kept[2]] * 2
    found = sequence_mask_weights(
        PROXIMAL, behaviour_N=BEHAVIOUR, lengths_B=LENGTHS, gate=gate, low=low, high=high, cap=None
    )
    weights = [own if keep else 0.0 for own, keep in zip(OWN, tokens, strict=True)]
    check(found, weights, [not keep for keep in tokens])


def test_a_mask_can_cap_what_it_keeps() -> None:
    found = sequence_mask_weights(
        PROXIMAL,
        behaviour_N=BEHAVIOUR,
        lengths_B=LENGTHS,
        gate="geometric_mean",
        low=0.8,
        high=1.4,
        cap=1.05,
    )
    check(
        found,
        [1.05, OWN[1], 1.05, 1.0, 0.0, 0.0],
        [True, False, True, False, True, True],
    )


def all_corrections(behaviour: Tensor) -> list[Tensor]:
    masks: list[Any] = ["geometric_mean", "product"]
    levels: list[Any] = ["token", "sequence"]
    return [
        *(
            truncated_weights(
                PROXIMAL, behaviour_N=behaviour, lengths_B=LENGTHS, level=level, cap=2.0
            ).weights_N
            for level in levels
        ),
        icepop_weights(PROXIMAL, behaviour_N=behaviour, low=0.5, high=2.0).weights_N,
        *(
            sequence_mask_weights(
                PROXIMAL,
                behaviour_N=behaviour,
                lengths_B=LENGTHS,
                gate=gate,
                low=0.5,
                high=2.0,
                cap=2.0,
            ).weights_N
            for gate in masks
        ),
    ]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_never_masked_away(broken: float) -> None:
    behaviour = BEHAVIOUR.clone()
    behaviour[2] = broken
    for weights in all_corrections(behaviour):
        assert weights[2].isnan()


def test_on_policy_nothing_is_changed() -> None:
    for weights in all_corrections(PROXIMAL):
        assert weights.tolist() == [1.0] * 6


@given(
    versions=st.lists(st.integers(-1, 12), min_size=6, max_size=6),
    current=st.integers(1, 10),
)
def test_the_interpolated_proximal_follows_the_versions(versions: list[int], current: int) -> None:
    logprobs = PROXIMAL.clone().requires_grad_()
    found = loglinear_proximal(
        logprobs,
        behaviour_N=BEHAVIOUR,
        versions_N=torch.tensor(versions, dtype=torch.int32),
        current_version=current,
    )
    expected = []
    for own, behaviour, version in zip(
        PROXIMAL.tolist(), BEHAVIOUR.tolist(), versions, strict=True
    ):
        if version < 0 or version >= current:
            alpha = 0.0
        else:
            alpha = min(max((current - 1 - version) / (current - version), 0.0), 1.0)
        expected.append(behaviour + alpha * (own - behaviour))
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.requires_grad
