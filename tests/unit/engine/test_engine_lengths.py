"""Drawn lengths: fixed work, whatever the weights say."""

from __future__ import annotations

import statistics

from engine_samples import engine_of, groups, run, tiny_model

from services.rollout.engine.lengths import DrawnLengths

LAW = DrawnLengths(median_tokens=32, p95_tokens=256, max_tokens=512)


def test_lengths_follow_the_law() -> None:
    lengths = sorted(LAW.of(seed * 7919) for seed in range(4000))
    assert abs(statistics.median(lengths) - 32) <= 2
    assert abs(lengths[3800] - 256) <= 40
    assert lengths[0] >= 1
    assert lengths[-1] == 512


def test_each_turn_draws_a_length_of_its_own() -> None:
    lengths = [tuple(LAW.of(seed, turn=turn) for turn in range(3)) for seed in range(500)]
    assert lengths == [tuple(LAW.of(seed, turn=turn) for turn in range(3)) for seed in range(500)]
    assert [first for first, _, _ in lengths] == [LAW.of(seed) for seed in range(500)]
    assert sum(len(set(turns)) > 1 for turns in lengths) > 450


def test_sequences_end_where_their_seeds_say_and_at_no_stop_token() -> None:
    law = DrawnLengths(median_tokens=6, p95_tokens=20, max_tokens=30)
    engine = engine_of(tiny_model(eos_token_id=3), max_new_tokens=64, lengths=law)
    starts = groups(num_groups=6, group_size=4)
    done = run(engine, starts)
    assert {s.key: len(done[s.key].tokens) for s in starts} == {
        s.key: law.of(s.seed) for s in starts
    }
    assert any(3 in one.tokens[:-1] for one in done.values())
