"""Later turns of a sequence: their own budget, and the draws of their positions."""

from __future__ import annotations

import msgspec
import torch
from engine_samples import engine_of, reference_logprobs, run, tiny_model

from services.rollout.engine.base import Generated, SequenceStart
from services.rollout.engine.lengths import DrawnLengths
from services.rollout.engine.torch_engine import TorchEngine
from services.rollout.turns import next_turn

START = SequenceStart(key="a", group="g", seed=11, prompt=(3, 9, 2))
SAID = [4, 5]


def two_turns(engine: TorchEngine) -> tuple[Generated, Generated]:
    first = run(engine, [START])["a"]
    return first, run(engine, [next_turn(START, first, SAID)])["a"]


def test_each_turn_has_the_whole_budget() -> None:
    first, second = two_turns(engine_of(tiny_model(), max_new_tokens=5))
    assert first.finish_reason == second.finish_reason == "length"
    assert second.tokens[:7] == [*first.tokens, *SAID]
    assert second.versions == [0] * 5 + [-1] * 2 + [0] * 5
    assert second.own_versions == [0] * 10
    assert second.logprobs[:7] == [*first.logprobs, 0.0, 0.0]


def test_a_later_turn_asks_for_what_the_first_one_did() -> None:
    first = run(engine_of(tiny_model(), max_new_tokens=5), [START])["a"]
    asked = SequenceStart(
        key="a", group="g", seed=11, prompt=(3, 9, 2), longest_first=True, max_new_tokens=5
    )
    then = next_turn(asked, first, SAID)
    so_far = {name: getattr(then, name) for name in ("tokens", "logprobs", "versions")}
    assert then == msgspec.structs.replace(asked, **so_far)
    assert then.tokens == (*first.tokens, *SAID)


def test_log_probs_of_a_later_turn_are_those_after_all_before_it() -> None:
    model = tiny_model()
    _, second = two_turns(engine_of(model, max_new_tokens=6))
    expected = reference_logprobs(model, START, second.tokens)
    told = torch.tensor(second.logprobs)
    torch.testing.assert_close(told[8:], expected[8:], atol=1e-5, rtol=0)


def test_a_later_turn_that_moves_half_done_has_the_bits_of_one_that_stayed() -> None:
    model = tiny_model()
    _, whole = two_turns(engine_of(model, deterministic=True, max_new_tokens=6))
    for cut in range(8, 14):  # right behind what was said, and after each token but the last
        start = SequenceStart(
            key="a",
            group="g",
            seed=11,
            prompt=START.prompt,
            tokens=tuple(whole.tokens[:cut]),
            logprobs=tuple(whole.logprobs[:cut]),
            versions=tuple(whole.versions[:cut]),
        )
        assert run(engine_of(model, deterministic=True, max_new_tokens=6), [start])["a"] == whole


def test_drawn_lengths_are_those_of_each_turn() -> None:
    law = DrawnLengths(median_tokens=6, p95_tokens=20, max_tokens=30)
    engine = engine_of(tiny_model(eos_token_id=3), max_new_tokens=64, lengths=law)
    first, second = two_turns(engine)
    assert len(first.tokens) == law.of(START.seed)
    assert len(second.own_versions) == law.of(START.seed) + law.of(START.seed, turn=1)
