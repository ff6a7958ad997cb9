"""Playing a graph forward."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.core.play import BATCH_COST, Policy, Position, Shares, play
from jigsawrl.core.slowdown import SlowdownTable
from jigsawrl.core.splits import critical_path_first, splits
from tests.unit.core.graphs import CPU, GPU, LEVELS, check, graph, node, position, random_graph


def equal(position: Position, device: int) -> Shares:
    lanes = position.lanes(device)
    return {lane: 1 / len(lanes) for lane in lanes}


def test_shares_set_the_pace_and_a_freed_share_is_given_on() -> None:
    start = position(graph(node("a.1", "d0", 2), node("b.1", "d0", 4)), record=True)
    assert play(start, policy=equal)
    played = start.played()
    assert played.finish_s == {"a.1": pytest.approx(4), "b.1": pytest.approx(6)}
    assert played.pipeline_finish_s == {"a": pytest.approx(4), "b": pytest.approx(6)}
    assert [(s.node, s.share, s.start_s, s.end_s) for s in played.timeline] == [
        ("a.1", 0.5, 0, 4),
        ("b.1", 0.5, 0, 4),
        ("b.1", 1.0, 4, 6),
    ]


def test_a_wait_takes_its_time_beside_anything() -> None:
    made = graph(node("a.1", None, 3), node("a.2", "d0", 1, after=["a.1"]), node("b.1", "d0", 5))
    start = position(made)
    play(start, policy=critical_path_first())
    assert start.played().finish_s["a.1"] == 3
    assert start.played().makespan_s == 6


def test_interference_costs_what_the_table_says() -> None:
    start = position(graph(node("a.1", "d0", 0.97), node("b.1", "d0", 0.97)), CPU)
    play(start, policy=equal)
    assert start.played().makespan_s == pytest.approx(2)


def test_a_hold_ends_when_it_has_been_too_long() -> None:
    made = graph(node("a.1", "d0", 100), node("b.1", "d0", 1))
    start = Position(made, CPU, max_hold_s=10, record=True)
    play(start, policy=critical_path_first(LEVELS))
    played = start.played()
    first = next(span for span in played.timeline if span.node == "b.1")
    assert first.start_s == pytest.approx(10)
    assert played.finish_s["b.1"] < 13


def test_a_hold_counts_from_where_it_was() -> None:
    made = graph(node("a.1", "d0", 100), node("b.1", "d0", 1))
    start = Position(made, CPU, max_hold_s=10, held_s={"b.1": 8}, shares={"a.1": 1.0}, record=True)
    start.advance()
    assert start.now_s == pytest.approx(2)
    assert [d.keys() for d in splits(start, 0, levels=LEVELS)] == [{1}, {1, 0}]


def test_memory_keeps_a_node_from_starting_until_another_ends() -> None:
    made = graph(
        node("a.1", "d0", 4, memory_bytes=6), node("b.1", "d0", 3, memory_bytes=6), memory_bytes=10
    )
    start = position(made, record=True)
    play(start, policy=critical_path_first())
    assert start.played().finish_s == {"a.1": 4, "b.1": 7}
    check(made, start.played(), capacity=1)


def test_a_node_that_has_waited_too_long_for_memory_is_next() -> None:
    """Small ones would pass it for ever: together they always hold too much."""
    small = [
        node(f"a.{i}", "d0", 3, memory_bytes=4, after=[f"a.{i - 2}"] if i > 1 else [])
        for i in range(12)
    ]
    made = graph(*small, node("b.1", "d0", 1, memory_bytes=10), memory_bytes=10)
    start = Position(made, CPU, max_hold_s=5)
    play(start, policy=critical_path_first())
    assert start.played().finish_s["b.1"] < 15


def test_merged_tails_run_in_one_batch_and_free_a_device() -> None:
    tails = [
        node(f"a.{i}", f"d{i}", 5, kind="tail_decode", movable_to=["d0"], move_s=0.5)
        for i in range(2)
    ]
    made = graph(*tails, node("b.1", "d1", 6))
    start = position(made, record=True)
    start.move(made.index["a.1"], 0)
    play(start, policy=critical_path_first())
    played = start.played()
    assert played.finish_s["b.1"] == 6
    assert played.finish_s["a.0"] == pytest.approx(5 * BATCH_COST)
    assert played.finish_s["a.1"] == pytest.approx(5 * BATCH_COST + 0.5)
    check(made, played, capacity=1)


def test_a_move_takes_its_memory_along() -> None:
    made = graph(
        node("a.1", "d0", 5, kind="tail_decode", memory_bytes=6, movable_to=["d1"]),
        node("b.1", "d1", 5, memory_bytes=6),
        memory_bytes=10,
    )
    start = position(made)
    for device in (0, 1):
        start.assign(device, equal(start, device))
    assert not start.can_move(0, 1)
    assert start.free_bytes(0) == 4


@given(st.integers(0, 10_000), st.sampled_from([CPU, GPU]), st.sampled_from([2.0, 1e6]), st.data())
@settings(deadline=None, max_examples=150)
def test_any_choice_from_the_action_space_keeps_the_rules(
    seed: int, table: SlowdownTable, max_hold_s: float, data: st.DataObject
) -> None:
    def drawn(position: Position, device: int) -> Shares:
        found = splits(position, device, levels=LEVELS)
        return found[data.draw(st.integers(0, len(found) - 1))]

    policies: list[Policy] = [drawn, critical_path_first(LEVELS)]
    for policy in policies:
        made = random_graph(seed)
        start = Position(made, table, max_hold_s=max_hold_s, record=True)
        assert play(start, policy=policy)
        check(made, start.played(), capacity=table.capacity)


@given(st.integers(0, 10_000), st.sampled_from([CPU, GPU]), st.sampled_from([2.0, 1e6]))
@settings(deadline=None, max_examples=100)
def test_shares_are_levels_that_the_device_has(
    seed: int, table: SlowdownTable, max_hold_s: float
) -> None:
    levels = (0.3, 0.6, 1.0)
    for policy in (
        critical_path_first(levels),
        lambda at, device: splits(at, device, levels=levels)[-1],
    ):
        start = Position(random_graph(seed), table, max_hold_s=max_hold_s, record=True)
        play(start, policy=policy)
        used = {span.share for span in start.played().timeline if span.device is not None}
        assert used <= {*levels, *(1 / n for n in range(4, 10))}


def test_a_copy_goes_its_own_way() -> None:
    start = position(random_graph(5), GPU)
    other = start.copy()
    play(other, policy=critical_path_first())
    assert start.now_s == 0
    assert not start.num_expanded
    again = start.copy()
    play(again, policy=critical_path_first())
    assert again.played() == other.played()
