"""Log-probs of chosen tokens under the sampling distribution."""

from __future__ import annotations

import math

import pytest
import torch

from jigsawrl.algorithms.logprobs import Filter, selected_logprobs

LOGITS = torch.tensor([[0.5, 0.25, 0.15, 0.1]], dtype=torch.float64).log()


def probability(token: int, sampling: Filter) -> float:
    logprobs, _ = selected_logprobs(LOGITS, tokens_N=torch.tensor([token]), sampling=sampling)
    return math.exp(float(logprobs))


def test_without_a_filter_it_is_the_softmax() -> None:
    assert probability(2, Filter()) == pytest.approx(0.15)


def test_temperature_divides_the_logits() -> None:
    powers = [p**0.5 for p in (0.5, 0.25, 0.15, 0.1)]
    assert probability(1, Filter(temperature=2.0)) == pytest.approx(powers[1] / sum(powers))


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Filter(top_k=2), 0.25 / 0.75),
        (Filter(top_k=9), 0.25),
        (Filter(top_p=0.7), 0.25 / 0.75),
        (Filter(top_p=0.76), 0.25 / 0.9),
        (Filter(top_k=3, top_p=0.8), 0.25 / 0.75),  # of 0.9: 0.556, 0.833
    ],
)
def test_what_the_filter_leaves_is_renormalised(sampling: Filter, expected: float) -> None:
    assert probability(1, sampling) == pytest.approx(expected)


def test_the_chosen_token_stays_where_the_policy_has_moved_away_from_it() -> None:
    assert probability(3, Filter(top_k=1)) == pytest.approx(0.1 / 0.6)


def test_chunks_change_neither_values_nor_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(13, 7, dtype=torch.float64, generator=generator, requires_grad=True)
    tokens = torch.randint(7, (13,), generator=generator)
    results = []
    for chunk_elements in (1, 21, 10**6):
        logprobs, entropies = selected_logprobs(
            logits, tokens_N=tokens, sampling=Filter(top_p=0.9), chunk_elements=chunk_elements
        )
        (gradient,) = torch.autograd.grad(logprobs.square().sum(), logits)
        results.append((logprobs, entropies, gradient))
    for other in results[1:]:
        for value, expected in zip(other, results[0], strict=True):
            assert torch.equal(value, expected)


def test_the_entropy_is_that_of_the_filtered_distribution() -> None:
    _, entropies = selected_logprobs(LOGITS, tokens_N=torch.tensor([0]), sampling=Filter(top_k=2))
    expected = -sum(p * math.log(p) for p in (2 / 3, 1 / 3))
    assert float(entropies) == pytest.approx(expected)
    assert not entropies.requires_grad
