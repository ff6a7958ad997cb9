"""Look-ahead and greedy choice: what they decide, and what they may never do."""

from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsawrl.core.graph import Graph
from jigsawrl.core.lookahead import Decision, Limits, Terms, apply, greedy, look_ahead
from jigsawrl.core.lookahead import play_deciding as play_on
from jigsawrl.core.play import Position, play
from jigsawrl.core.slowdown import SlowdownProfile, SlowdownRow, SlowdownTable
from jigsawrl.core.splits import critical_path_first
from tests.unit.core.graphs import (
    CPU,
    GPU,
    IDEAL,
    LEVELS,
    check,
    graph,
    node,
    position,
    random_graph,
)

LIMITS = Limits(levels=LEVELS, max_expanded=2000)


def decide(of: Graph, table: SlowdownTable = IDEAL, **terms: Terms) -> Decision:
    return look_ahead(position(of, table), terms=terms, limits=LIMITS)


def pairing(*, tail_cost: float = 1.0) -> SlowdownTable:
    """Training runs well beside a tail, and badly beside bulk decode."""
    pairs = [
        ("tail_decode", "forward_backward", 0.9 / tail_cost),
        ("forward_backward", "tail_decode", 0.7 / tail_cost),
        ("bulk_decode", "forward_backward", 0.5),
        ("forward_backward", "bulk_decode", 0.6),
    ]
    alone = [("tail_decode", 0.95), ("forward_backward", 0.75), ("bulk_decode", 0.7)]
    rows = [
        *(
            {"kind": k, "share": 0.5, "beside": b, "beside_share": 0.5, "speed": s}
            for k, b, s in pairs
        ),
        *({"kind": k, "share": 0.5, "speed": s} for k, s in alone),
    ]
    return SlowdownTable(
        SlowdownProfile(
            device_kind="gpu",
            source="made up",
            rows=tuple(SlowdownRow(**row) for row in rows),  # type: ignore[arg-type]
        )
    )


PAIRING = graph(
    node("a.1", "d0", 6, kind="bulk_decode"),
    node("a.2", "d0", 6, kind="tail_decode", after=["a.1"]),
    node("b.1", "d0", 5, kind="forward_backward"),
)
"""Training beside the bulk decode gains at once, and spoils the better pair that comes later."""


def test_look_ahead_keeps_training_for_the_tail_where_greedy_spoils_it() -> None:
    table = pairing()
    ahead = play_on(position(PAIRING, table), decide=partial(look_ahead, terms={}, limits=LIMITS))
    at_once = play_on(position(PAIRING, table), decide=partial(greedy, terms={}, limits=LIMITS))
    optimum_s = 6 + 6 / 0.9 + (5 - 0.7 * 6 / 0.9)
    assert ahead.makespan_s == pytest.approx(optimum_s)
    assert at_once.makespan_s > 1.2 * optimum_s


def test_a_pair_that_costs_twice_as_much_is_avoided() -> None:
    assert decide(PAIRING, pairing()).shares == {"a.1": 1.0, "b.1": 0.0}
    assert decide(PAIRING, pairing(tail_cost=2.0)).shares == {"a.1": 0.5, "b.1": 0.5}


def test_what_others_wait_for_goes_first() -> None:
    made = graph(node("a.1", "d0", 4), node("b.1", "d0", 4), node("b.2", "d1", 8, after=["b.1"]))
    assert decide(made).shares == {"a.1": 0.0, "b.1": 1.0}
    assert decide(made).makespan_s == pytest.approx(12)
    at_once = play_on(position(made), decide=partial(greedy, terms={}, limits=LIMITS))
    assert at_once.makespan_s == pytest.approx(16)


def merging() -> Graph:
    """Three short tails hold three devices, on two of which another pipeline wants to train."""
    tails = [
        node(f"a.{i}", f"d{i}", 6, kind="tail_decode", movable_to=["d0", "d1", "d2"], move_s=0.2)
        for i in range(3)
    ]
    ranks = [node(f"b.{i}", f"d{i}", 9, kind="forward_backward") for i in (1, 2)]
    return graph(*tails, *ranks, node("b.3", "d1", 1, after=["b.1", "b.2"]))


@pytest.mark.parametrize("choose", [look_ahead, greedy])
def test_tails_are_merged_when_the_freed_devices_are_wanted(choose: object) -> None:
    decided = choose(position(merging(), CPU), terms={}, limits=LIMITS)  # type: ignore[operator]
    assert decided.moves == {"a.1": "d0", "a.2": "d0"}
    assert decided.shares == {"a.0": 1.0, "a.1": 1.0, "a.2": 1.0, "b.1": 1.0, "b.2": 1.0}


def test_a_move_that_costs_more_than_it_gains_is_not_made() -> None:
    tails = [
        node(f"a.{i}", f"d{i}", 6, kind="tail_decode", movable_to=["d0", "d1"], move_s=20)
        for i in range(2)
    ]
    assert not decide(graph(*tails, node("b.1", "d1", 9))).moves


@pytest.mark.parametrize(("memory_bytes", "num_moves"), [(10, 0), (12, 2)])
def test_tails_merge_only_where_all_their_memory_fits(memory_bytes: int, num_moves: int) -> None:
    devices = ["d0", "d1", "d2"]
    tails = [
        node(f"a.{i}", f"d{i}", 6, kind="tail_decode", memory_bytes=4, movable_to=devices)
        for i in range(3)
    ]
    ranks = [node(f"b.{i}", f"d{i}", 9, kind="forward_backward") for i in (1, 2)]
    made = graph(*tails, *ranks, memory_bytes=memory_bytes)
    ids = ["a.0", "a.1", "a.2"]
    start = Position(made, CPU, max_hold_s=1e6, started=ids, shares=dict.fromkeys(ids, 1.0))
    assert len(look_ahead(start, terms={}, limits=LIMITS).moves) == num_moves


def test_a_tail_moves_to_a_device_that_has_become_idle() -> None:
    tail = node("a.1", "d0", 6, kind="tail_decode", movable_to=["d1"], move_s=0.5)
    start = position(graph(tail, node("b.1", "d0", 6), node("c.1", "d1", 1)))
    for device in (0, 1):
        start.assign(device, {start.here[device][-1]: 1.0})
    start.advance()
    assert look_ahead(start, terms={}, limits=LIMITS).moves == {"a.1": "d1"}


def test_between_equal_makespans_the_heavier_pipeline_ends_first() -> None:
    made = graph(node("a.1", "d0", 5), node("b.1", "d0", 5))
    assert decide(made, b=Terms(weight=3)).shares == {"a.1": 0.0, "b.1": 1.0}
    assert decide(made, a=Terms(weight=3)).shares == {"a.1": 1.0, "b.1": 0.0}


def test_a_latency_cap_comes_before_the_makespan() -> None:
    made = graph(node("a.1", "d0", 2), node("b.1", "d0", 4), node("b.2", "d1", 8, after=["b.1"]))
    assert decide(made).shares["a.1"] == 0
    capped = decide(made, a=Terms(max_slowdown=1.5))
    assert capped.shares == {"a.1": 1.0, "b.1": 0.0}
    late = Terms(max_slowdown=2.0, elapsed_s=6, alone_elapsed_s=2)
    assert decide(made, a=late).shares["a.1"] == 1.0


def test_a_cap_that_cannot_be_kept_is_missed_by_little() -> None:
    made = graph(node("a.1", "d0", 2), node("b.1", "d0", 4))
    late = Terms(max_slowdown=1.1, elapsed_s=100, alone_elapsed_s=2)
    assert decide(made, a=late).shares == {"a.1": 1.0, "b.1": 0.0}


def test_a_start_is_held_back_where_its_memory_would_be_in_the_way() -> None:
    made = graph(
        node("a.1", "d0", 20, memory_bytes=6),
        node("b.1", None, 1),
        node("b.2", "d0", 4, memory_bytes=6, after=["b.1"]),
        node("b.3", "d1", 30, after=["b.2"]),
        memory_bytes=10,
    )
    assert decide(made).shares == {"a.1": 0.0}
    assert decide(made).makespan_s == pytest.approx(35)
    assert decide(made).default_makespan_s == pytest.approx(54)


@pytest.mark.parametrize("num_pipelines", [1, 3, 5, 8])
def test_any_number_of_pipelines_shares_a_device(num_pipelines: int) -> None:
    made = graph(*(node(f"p{i}.1", "d0", 10) for i in range(num_pipelines)))
    for choose in (look_ahead, greedy):
        start = Position(made, CPU, max_hold_s=3, record=True)
        played = play_on(start, decide=partial(choose, terms={}, limits=Limits()))
        check(made, played, capacity=1)
        starts = {s.node: s.start_s for s in reversed(played.timeline)}
        assert max(starts.values()) <= 3 + 1e-6


def test_where_there_is_one_thing_to_do_nothing_is_searched() -> None:
    made = graph(node("a.1", "d0", 5), node("b.1", "d1", 5), node("b.2", "d0", 5, after=["b.1"]))
    assert decide(made).num_candidates == 1
    empty = look_ahead(Position(Graph([], devices=[]), CPU, max_hold_s=1), terms={}, limits=LIMITS)
    assert not empty.shares


def test_only_touched_devices_get_new_shares() -> None:
    made = graph(*(node(f"{p}.{d}", f"d{d}", 5) for p in "ab" for d in range(3)))
    now = {"a.0": 1.0, "a.1": 1.0, "a.2": 1.0}
    start = Position(made, IDEAL, max_hold_s=1e6, shares=now)
    decided = look_ahead(start, terms={}, limits=LIMITS, touched=["d1"])
    assert set(decided.shares) == {"a.1", "b.1"}


def test_the_search_is_bounded_and_leaves_the_position_as_it_is() -> None:
    made = random_graph(5)
    start = position(made, GPU)
    small = look_ahead(start, terms={}, limits=Limits(levels=LEVELS, max_expanded=20))
    assert small.num_expanded < 20 + len(made.nodes)
    assert start.now_s == 0
    assert not any(start.share)
    large = look_ahead(start, terms={}, limits=LIMITS)
    assert large.num_candidates > small.num_candidates
    assert large == look_ahead(start, terms={}, limits=LIMITS)


def test_a_decision_keeps_its_promise_when_the_list_schedule_goes_on() -> None:
    start = position(PAIRING, pairing())
    decided = look_ahead(start, terms={}, limits=LIMITS)
    apply(start, decision=decided)
    start.advance()
    play(start, policy=critical_path_first(LEVELS))
    assert start.now_s == pytest.approx(decided.makespan_s)
    assert decided.makespan_s < decided.default_makespan_s


@given(
    st.integers(0, 10_000),
    st.sampled_from([CPU, GPU]),
    st.sampled_from([2.0, 1e6]),
    st.sampled_from([look_ahead, greedy]),
)
@settings(deadline=None, max_examples=60)
def test_every_node_ends_within_shares_memory_and_order(
    seed: int, table: SlowdownTable, max_hold_s: float, choose: object
) -> None:
    made = random_graph(seed)
    start = Position(made, table, max_hold_s=max_hold_s, record=True)
    terms = {"p0": Terms(weight=2, max_slowdown=1.5)}
    limits = Limits(levels=LEVELS, max_expanded=100)
    played = play_on(start, decide=partial(choose, terms=terms, limits=limits))  # type: ignore[arg-type]
    check(made, played, capacity=table.capacity)
