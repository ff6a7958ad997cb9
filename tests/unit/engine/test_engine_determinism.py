"""The deterministic engine: bit for bit the same, whatever happens beside and to a sequence."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from engine_samples import VOCAB_SIZE, engine_of, finish, groups, load, run, tiny_model
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from services.rollout.engine.base import Generated, SequenceStart
from services.rollout.engine.torch_engine import TorchEngine

MAX_POSITIONS = 448
SHAPES: dict[str, dict[str, Any]] = {
    # As the example's model: every width a multiple of 32.
    "even": {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32, "num_hidden_layers": 3},
    # Nothing a multiple of a vector's width; three query heads per key-value head.
    "odd": {
        "hidden_size": 33,
        "intermediate_size": 51,
        "vocab_size": 41,
        "num_attention_heads": 6,
        "head_dim": 12,
    },
    "one query head each": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    "one key-value head": {"num_attention_heads": 9, "num_key_value_heads": 1, "hidden_size": 100},
    "biased": {"hidden_size": 96, "intermediate_size": 100, "head_dim": 4},
}
KINDS = {"biased": "llama-biased", "one query head each": "qwen3-tied"}
SAMPLING: dict[str, dict[str, Any]] = {
    "odd": {"temperature": 0.7, "top_k": 30, "top_p": 0.9},
    "one key-value head": {"greedy": True},
}

Bits = tuple[list[int], list[float]]


@cache
def model_of(shape: str) -> Any:
    options = {"max_position_embeddings": MAX_POSITIONS, "initializer_range": 0.15}
    return tiny_model(KINDS.get(shape, "qwen3"), **(options | SHAPES[shape]))


@cache
def engine_for(shape: str, max_running: int, number: int = 0) -> TorchEngine:
    """Kept from test to test: what earlier sequences left in its cache must not show either."""
    return engine_of(
        model_of(shape),
        max_running=max_running,
        deterministic=True,
        max_new_tokens=MAX_POSITIONS,
        **SAMPLING.get(shape, {}),
    )


def bits(one: Generated) -> Bits:
    return one.tokens, one.logprobs


def alone(shape: str, starts: list[SequenceStart]) -> dict[str, Bits]:
    """Each sequence from its prompt to its end with nothing beside it."""
    engine = engine_for(shape, 1)
    return {start.key: bits(run(engine, [start])[start.key]) for start in starts}


def sequences(rng: random.Random, *, num_groups: int = 3) -> list[SequenceStart]:
    """Prompts of 1 to 300 tokens, answers of 1 to 90."""
    starts = []
    for group in range(num_groups):
        length = rng.choice([1, 2, 31, 32, 33, rng.randint(1, 40), rng.randint(40, 300)])
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(length))
        starts += [
            SequenceStart(
                key=f"{group}/{member}",
                group=str(group),
                seed=rng.getrandbits(64),
                prompt=prompt,
                max_new_tokens=rng.choice([rng.randint(1, 10), rng.randint(10, 90)]),
            )
            for member in range(rng.randint(1, 4))
        ]
    return starts


def resumed(start: SequenceStart, record: Generated) -> SequenceStart:
    return msgspec.structs.replace(
        start,
        tokens=tuple(record.tokens),
        logprobs=tuple(record.logprobs),
        versions=tuple(record.versions),
    )


def disturbed(shape: str, starts: list[SequenceStart], rng: random.Random) -> dict[str, Bits]:
    """The same sequences on two engines: they join in bits, move from record to record, are
    dropped and begun again, and see the same weights loaded anew."""
    engines = [
        engine_for(shape, rng.choice([2, 5, 40]), 0),
        engine_for(shape, rng.choice([1, 3, 17]), 1),
    ]
    by_key = {start.key: start for start in starts}
    waiting = rng.sample(starts, len(starts))
    finished: dict[str, Generated] = {}
    while waiting or any(engine.held() for engine in engines):
        engine = rng.choice(engines)
        for _ in range(rng.choice([1, 5, 30])):
            finished |= {one.key: one for one in engine.step().finished}
        act = rng.random()
        if waiting and act < 0.6:
            num = rng.randint(1, len(waiting))
            engine.add(waiting[:num])
            waiting = waiting[num:]
        elif act < 0.75:
            load(engine, model_of(shape), version=(engine.version or 0) + 1, keep_kv=False)
        elif engine.held() and act < 0.95:
            moving = rng.sample(engine.held(), rng.randint(1, len(engine.held())))
            records = engine.snapshot(moving)
            engine.drop(moving)
            again = rng.random() < 0.2
            rng.choice(engines).add(
                by_key[one.key] if again else resumed(by_key[one.key], one) for one in records
            )
    return {key: bits(one) for key, one in finished.items()}


@pytest.mark.parametrize("shape", SHAPES)
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],  # a seed has no smaller one that says more
)
@given(seed=st.integers(0, 2**32))
def test_nothing_beside_or_before_shows_in_the_bits(shape: str, seed: int) -> None:
    rng = random.Random(seed)
    starts = sequences(rng)
    assert disturbed(shape, starts, rng) == alone(shape, starts)


@pytest.mark.parametrize("shape", ["even", "odd"])
def test_every_cut_of_a_sequence_continues_with_the_same_bits(shape: str) -> None:
    start = SequenceStart(key="a", group="g", seed=5, prompt=tuple(range(30)), max_new_tokens=290)
    engine = engine_for(shape, 40)
    whole = run(engine, [start])["a"]
    assert bits(whole) == alone(shape, [start])["a"]
    cuts = [
        msgspec.structs.replace(
            start,
            key=str(cut),
            tokens=tuple(whole.tokens[:cut]),
            logprobs=tuple(whole.logprobs[:cut]),
            versions=tuple(whole.versions[:cut]),
        )
        for cut in range(1, len(whole.tokens), 7)
    ]
    for one in run(engine, cuts).values():
        assert bits(one) == bits(whole)


def at_every_boundary(
    engine: TorchEngine, starts: list[SequenceStart]
) -> tuple[list[Generated], dict[str, Generated]]:
    """What a worker would hand over of each sequence before each of its tokens, and the ends."""
    engine.add(starts)
    records, ends = engine.snapshot([start.key for start in starts]), {}
    while engine.held():
        ends |= {one.key: one for one in engine.step().finished}
        records += engine.snapshot(engine.held())
    return records, ends


@pytest.mark.parametrize("shape", SHAPES)
@settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate],
)
@given(seed=st.integers(0, 2**32))
def test_cut_before_any_token_a_sequence_goes_on_elsewhere_with_the_same_bits(
    shape: str, seed: int
) -> None:
    rng = random.Random(seed)
    starts = [
        msgspec.structs.replace(start, max_new_tokens=rng.randint(1, 40))
        for start in sequences(rng, num_groups=2)
    ]
    by_key = {start.key: start for start in starts}
    records, ends = at_every_boundary(engine_for(shape, 5, 0), starts)
    for one in starts:
        cuts = {len(r.tokens) for r in records if r.key == one.key}
        assert cuts == set(range(len(ends[one.key].tokens)))
    moved = [
        msgspec.structs.replace(resumed(by_key[one.key], one), key=f"{one.key}@{len(one.tokens)}")
        for one in records
    ]
    for key, one in run(engine_for(shape, 17, 1), moved).items():
        end = ends[key.partition("@")[0]]
        assert bits(one) == bits(end)


def test_more_sequences_than_the_largest_number_of_rows_change_no_bit() -> None:
    starts = [
        msgspec.structs.replace(start, max_new_tokens=6 + i % 5)
        for i, start in enumerate(groups(num_groups=150, group_size=2))
    ]
    together = run(engine_for("odd", 300), starts)
    some = starts[::17]
    assert {start.key: bits(together[start.key]) for start in some} == alone("odd", some)


def test_bfloat16_is_as_independent_of_the_batch() -> None:
    engine = engine_of(model_of("even"), deterministic=True, dtype=torch.bfloat16)
    starts = groups()
    together = run(engine, starts)
    assert all(
        bits(run(engine, [start])[start.key]) == bits(together[start.key]) for start in starts
    )


@pytest.mark.parametrize("shape", ["even", "odd", "biased"])
def test_the_fast_engine_agrees_up_to_rounding(shape: str) -> None:
    # Weights of the usual size: rounding grows with the logits.
    model = tiny_model(KINDS.get(shape, "qwen3"), **(SHAPES[shape] | {"initializer_range": 0.02}))
    starts = groups()
    exact, fast = (
        run(engine_of(model, deterministic=deterministic, max_new_tokens=64), starts)
        for deterministic in (True, False)
    )
    gaps = [
        abs(a - b)
        for key, one in exact.items()
        for a, b, same in zip(
            one.logprobs, fast[key].logprobs, _agreeing(one.tokens, fast[key].tokens), strict=True
        )
        if same
    ]
    assert len(gaps) > 100
    assert max(gaps) < 1e-5


def _agreeing(a: list[int], b: list[int]) -> list[bool]:
    """Up to the first token that a near tie made another."""
    return [a[: i + 1] == b[: i + 1] for i in range(min(len(a), len(b)))]


def test_weights_may_change_in_mid_run_with_keys_and_values_kept() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    starts = groups()
    results = []
    for deterministic in (True, False):
        engine = engine_of(old, deterministic=deterministic)
        engine.add(starts)
        for _ in range(10):
            engine.step()
        load(engine, new, version=4, keep_kv=True)
        results.append(finish(engine)[0])
    exact, fast = results
    for key, one in exact.items():
        assert one.versions == [0] * 10 + [4] * 14
        assert one.tokens == fast[key].tokens
        assert one.logprobs == pytest.approx(fast[key].logprobs, abs=1e-4)
