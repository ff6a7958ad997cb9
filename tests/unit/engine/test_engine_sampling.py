"""Random numbers by counter, and the filter whose log-probs are honest."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from services.rollout.engine.sampling import Sampling, draw, filtered, uniforms

NUM_DRAWS = 40_000


def positions(num: int) -> Tensor:
    return torch.arange(num)[None]


def test_a_draw_depends_on_seed_and_position_and_on_nothing_else() -> None:
    seeds = [0, 1, 2**63, 2**64 - 1, 12345]
    together = uniforms(seeds, positions(50))
    for row, seed in enumerate(seeds):
        assert torch.equal(uniforms([seed], positions(80))[0, :50], together[row])
    shifted = uniforms([12345], torch.tensor([[7, 3]]))[0]
    assert shifted.tolist() == [together[4, 7].item(), together[4, 3].item()]


def test_draws_are_uniform_and_neighbouring_seeds_unrelated() -> None:
    draws = uniforms(list(range(200)), positions(500))
    assert 0.0 <= draws.min() < draws.max() < 1.0
    assert draws.unique().numel() == draws.numel()
    counts = torch.histc(draws.float(), bins=20, min=0.0, max=1.0)
    expected = draws.numel() / 20
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_squared < 43.8  # 99.9% quantile at 19 degrees of freedom
    for first, second in ((draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])):
        pair = torch.stack([first.flatten(), second.flatten()])
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 4 / math.sqrt(first.numel())


@pytest.mark.parametrize(
    ("options", "num_kept"),
    [
        ({}, 8),
        ({"temperature": 0.5}, 8),
        ({"top_k": 3}, 3),
        ({"top_p": 0.6}, 2),
        ({"top_p": 1e-6}, 1),
        ({"top_k": 4, "top_p": 0.9, "temperature": 2.0}, 4),
    ],
)
def test_a_logprob_is_that_of_the_distribution_drawn_from(
    options: dict[str, float], num_kept: int
) -> None:
    probs = torch.tensor([0.02, 0.40, 0.01, 0.25, 0.15, 0.10, 0.05, 0.02])
    logits = probs.log()[None].repeat(NUM_DRAWS, 1)
    sampling = Sampling(max_new_tokens=1, **options)  # type: ignore[arg-type]
    tokens, logprobs = draw(logits, uniforms([7], positions(NUM_DRAWS))[0], sampling)
    counts = torch.bincount(tokens, minlength=8)
    drawn = counts.nonzero()[:, 0]
    kept = filtered(logits[:1], sampling)[0].isfinite().nonzero()[:, 0]
    assert torch.equal(drawn, kept)
    assert len(kept) == num_kept
    stated = {
        int(t): math.exp(lp) for t, lp in zip(tokens.tolist(), logprobs.tolist(), strict=True)
    }
    assert sum(stated.values()) == pytest.approx(1.0, abs=1e-5)
    for token, prob in stated.items():
        spread = math.sqrt(prob * (1 - prob) / NUM_DRAWS)
        assert counts[token].item() / NUM_DRAWS == pytest.approx(prob, abs=4.5 * spread + 1e-9)


def test_the_temperature_comes_before_the_nucleus() -> None:
    logits = torch.tensor([[0.6, 0.3, 0.1]]).log()
    kept = [
        filtered(logits, Sampling(max_new_tokens=1, temperature=t, top_p=0.7))
        .isfinite()
        .sum()
        .item()
        for t in (0.5, 1.0, 10.0)
    ]
    assert kept == [1, 2, 3]


def test_greedy_takes_the_largest_logit_and_states_its_whole_logprob() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs = draw(
        logits, torch.tensor([0.99]), Sampling(max_new_tokens=1, greedy=True, top_k=1)
    )
    assert tokens.tolist() == [1]
    assert logprobs[0].item() == pytest.approx(logits.log_softmax(-1)[0, 1].item())
