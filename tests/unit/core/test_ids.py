"""Ids, seeds, sets of ids, and stream time."""

from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.core import ids
from jigsawrl.core.clock import StreamClock


@given(st.lists(st.integers(0, 30)))
def test_id_ranges_behave_like_a_set(numbers: list[int]) -> None:
    ranges, expected = ids.IdRanges(), set[int]()
    for number in numbers:
        if number in expected:
            ranges.remove(number)
            expected.remove(number)
        else:
            ranges.add(number)
            expected.add(number)
        assert ranges.numbers() == sorted(expected)
        assert len(ranges) == len(expected)
        assert all((n in ranges) == (n in expected) for n in range(31))


def test_ids_that_end_in_order_take_one_range() -> None:
    ranges = ids.IdRanges()
    for number in range(1000):
        ranges.add(number)
    assert ranges.ranges == [(0, 1000)]


def test_ids_can_be_read_back_and_nonsense_is_none() -> None:
    assert ids.parse_group("a-b", ids.group_id("a-b", 12)) == 12
    assert ids.parse_sequence("a-b", ids.sequence_id("a-b", 12, 3)) == (12, 3)
    for nonsense in ("", "p", "p/g", "p/gx", "p/g1/sx", "p/g1/s", "p/g-1/s2", "p/g²/s1"):
        assert ids.parse_sequence("a-b", nonsense) is None
        assert ids.parse_group("a-b", nonsense) is None


def test_a_seed_depends_on_pipeline_seed_prompt_and_sample_alone() -> None:
    seeds = {ids.sequence_seed(s, c, i) for s in range(5) for c in range(5) for i in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert ids.sequence_seed(1, 2, 3) == ids.sequence_seed(1, 2, 3)


def test_stream_time_is_bounded_per_message_and_a_gap_restarts_leases() -> None:
    clock = StreamClock()
    assert clock.advance(100.0) == 0.0
    assert clock.advance(100.1) == 0.1 or abs(clock.now_s - 0.1) < 1e-9
    before_s = clock.now_s
    assert clock.advance(99.0) == before_s
    assert not clock.expired(before_s, term_s=0.3)
    clock.advance(99.2)
    clock.advance(99.4)
    assert clock.expired(before_s, term_s=0.3)
    clock.advance(150.0)
    assert clock.now_s < before_s + 0.7
    assert not clock.expired(before_s, term_s=0.3)
