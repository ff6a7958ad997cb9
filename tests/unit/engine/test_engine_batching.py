"""Continuous batching: who shares a step with whom never shows in the tokens."""

from __future__ import annotations

import msgspec
import pytest
import torch
from engine_samples import (
    VOCAB_SIZE,
    engine_of,
    finish,
    groups,
    largest_gap,
    load,
    reference_logprobs,
    run,
    tiny_model,
)

from services.rollout.engine.base import SequenceStart
from services.rollout.engine.sampling import Sampling
from services.rollout.engine.torch_engine import TorchEngine


@pytest.mark.parametrize("max_running", [1, 5, 64])
def test_tokens_are_the_same_whatever_the_batch(max_running: int) -> None:
    model = tiny_model(eos_token_id=3)
    starts = groups(num_groups=6, group_size=4)
    expected = {s.key: run(engine_of(model), [s])[s.key].tokens for s in starts}
    mixed = run(engine_of(model, max_running=max_running), starts)
    assert {key: one.tokens for key, one in mixed.items()} == expected
    assert len({len(tokens) for tokens in expected.values()}) > 3  # ragged, or it shows nothing


def test_sequences_join_while_others_run() -> None:
    model = tiny_model()
    starts = groups()
    engine = engine_of(model)
    engine.add(starts[:5])
    for _ in range(9):
        engine.step()
    assert engine.num_running == 5
    engine.add(starts[5:])
    assert largest_gap(model, starts, finish(engine)[0]) < 1e-4


def test_the_prompt_of_a_group_is_computed_once() -> None:
    starts = groups(num_groups=3, group_size=6)
    engine = engine_of(tiny_model(), max_running=64)
    engine.add(starts)
    finished, work = finish(engine)
    prefilled = sum(part.num_tokens for part in work if part.kind == "prefill")
    assert prefilled == sum(len(start.prompt) - 1 for start in starts[::6])
    decoded = sum(part.num_tokens for part in work if part.kind != "prefill")
    assert decoded == sum(len(one.tokens) for one in finished.values())


@pytest.mark.parametrize(("tail_sequences", "kind"), [(2, "bulk_decode"), (3, "tail_decode")])
def test_decoding_is_a_tail_from_where_the_scheduler_says(tail_sequences: int, kind: str) -> None:
    engine = engine_of(tiny_model(), tail_sequences=tail_sequences)
    engine.add(groups(num_groups=1, group_size=3))
    assert [part.kind for part in engine.step().work if part.kind != "prefill"] == [kind]


def test_members_that_join_later_copy_the_prompt_of_one_that_runs() -> None:
    model = tiny_model()
    first, *later = groups(num_groups=1, group_size=6)
    engine = engine_of(model, max_running=3)
    engine.add(
        [first, *(msgspec.structs.replace(s, max_new_tokens=4 + i) for i, s in enumerate(later))]
    )
    finished, work = finish(engine)
    assert sum(w.num_tokens for w in work if w.kind == "prefill") == len(first.prompt) - 1
    assert largest_gap(model, [first, *later], finished) < 1e-4


def test_a_sequence_ends_at_a_stop_token_which_it_keeps() -> None:
    model = tiny_model(eos_token_id=[3, 4])
    finished = run(engine_of(model, max_new_tokens=100), groups(8, 4))
    reasons = {one.finish_reason for one in finished.values()}
    assert "stop" in reasons
    for one in finished.values():
        stops = [i for i, token in enumerate(one.tokens) if token in (3, 4)]
        assert stops == ([len(one.tokens) - 1] if one.finish_reason == "stop" else [])


def test_a_sequence_ends_at_its_own_limit_and_at_the_models() -> None:
    start = groups(1, 1)[0]
    engine = engine_of(tiny_model(), max_new_tokens=500)
    short = msgspec.structs.replace(start, key="short", max_new_tokens=5)
    finished = run(engine, [start, short])
    assert len(finished["short"].tokens) == 5
    assert len(start.prompt) + len(finished[start.key].tokens) == 128  # max_position_embeddings
    assert {one.finish_reason for one in finished.values()} == {"length"}


def test_weights_loaded_in_mid_run_keep_tokens_and_stamp_versions() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    starts = groups()
    engine = engine_of(old)
    engine.add(starts)
    for _ in range(10):
        engine.step()
    before = {one.key: one.tokens for one in engine.snapshot([s.key for s in starts])}
    load(engine, new, version=4, keep_kv=False)
    for key, one in finish(engine)[0].items():
        assert one.tokens[:10] == before[key]
        assert one.versions == [0] * 10 + [4] * 14
        start = next(s for s in starts if s.key == key)
        # Recomputed keys and values: as if the new weights had read the whole prefix.
        expected = reference_logprobs(new, start, one.tokens)[10:]
        assert torch.allclose(torch.tensor(one.logprobs[10:]), expected, atol=1e-4)
        expected = reference_logprobs(old, start, one.tokens)[:10]
        assert torch.allclose(torch.tensor(one.logprobs[:10]), expected, atol=1e-4)


def test_kept_keys_and_values_are_those_of_the_old_weights() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    start = groups(1, 1)[0]
    results = []
    for keep_kv in (True, False):
        engine = engine_of(old)
        engine.add([start])
        for _ in range(10):
            engine.step()
        load(engine, new, version=1, keep_kv=keep_kv)
        results.append(finish(engine)[0][start.key])
    kept, recomputed = results
    assert kept.versions == recomputed.versions
    assert kept.tokens[:10] == recomputed.tokens[:10]
    assert kept.logprobs[10] != pytest.approx(recomputed.logprobs[10], abs=1e-3)


def test_new_members_of_a_group_read_their_prompt_with_the_new_weights() -> None:
    old, new = tiny_model(seed=0), tiny_model(seed=1)
    starts = groups(1, 4)
    engine = engine_of(old, max_running=2)
    engine.add(starts[:1])
    engine.step()
    load(engine, new, version=1, keep_kv=True)
    engine.add(starts[1:])
    finished = finish(engine)[0]
    assert largest_gap(new, starts[1:], finished) < 1e-4


def test_a_sequence_moved_to_another_engine_goes_on_as_if_it_had_stayed() -> None:
    model = tiny_model()
    starts = groups()
    stayed = run(engine_of(model), starts)
    source = engine_of(model)
    source.add(starts)
    for _ in range(7):
        source.step()
    moved = {one.key: one for one in source.snapshot([s.key for s in starts])}
    resumed = [
        msgspec.structs.replace(
            s,
            tokens=tuple(moved[s.key].tokens),
            logprobs=tuple(moved[s.key].logprobs),
            versions=tuple(moved[s.key].versions),
        )
        for s in starts
    ]
    target = run(engine_of(model), resumed)
    for key, one in stayed.items():
        assert target[key].tokens == one.tokens
        assert target[key].versions == one.versions
        assert target[key].logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_dropped_sequences_leave_the_others_alone() -> None:
    model = tiny_model()
    starts = groups(num_groups=6, group_size=3)
    engine = engine_of(model, max_running=12)
    engine.add(starts)
    for _ in range(5):
        engine.step()
    dropped = [starts[0].key, starts[7].key, starts[16].key, "unknown"]
    engine.drop(dropped)
    finished = finish(engine)[0]
    rest = [s for s in starts if s.key not in dropped]
    assert set(finished) == {s.key for s in rest}
    assert largest_gap(model, rest, finished) < 1e-4


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ((), "the prompt has no tokens"),
        ((1,) * 128, "128 tokens leave no room to generate: the model has 128 positions"),
        ((1, VOCAB_SIZE), f"token id {VOCAB_SIZE} is outside the model's vocabulary"),
        ((1, -1), "token id -1 is outside the model's vocabulary"),
    ],
)
def test_what_the_model_can_not_generate_is_told_with_the_reason(
    prompt: tuple[int, ...], reason: str
) -> None:
    engine = engine_of(tiny_model())
    start = SequenceStart(key="a", group="g", seed=0, prompt=prompt)
    assert (engine.check(start) or "").startswith(reason)


def test_nothing_is_generated_before_the_first_weights() -> None:
    model = tiny_model()
    engine = TorchEngine(
        sampling=Sampling(max_new_tokens=4),
        max_running=4,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    starts = groups()
    engine.add(starts)
    step = engine.step()
    assert (step.finished, step.work, engine.num_waiting) == ([], [], len(starts))
    load(engine, model, version=0)
    assert len(finish(engine)[0]) == len(starts)
