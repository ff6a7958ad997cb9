"""Which sequences that wait for a slot join first, and that nothing else depends on it."""

from __future__ import annotations

import msgspec
from engine_samples import engine_of, finish, groups, run, tiny_model
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.engine.base import SequenceStart
from services.rollout.engine.waiting import Waiting, longest_first

TOKENS = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 50))


def start(key: str, *, num_tokens: int = 0, probed: bool = True) -> SequenceStart:
    """``a0`` is of group ``a``."""
    return SequenceStart(
        key=key,
        group=key[0],
        seed=0,
        prompt=(1,),
        tokens=(2,) * num_tokens,
        longest_first=probed,
    )


def keys(starts: list[SequenceStart]) -> str:
    return " ".join(one.key for one in starts)


def test_probes_go_first_and_then_groups_by_their_longest_sample() -> None:
    starts = [start(f"{group}{index}") for group in "abc" for index in range(3)]
    assert keys(longest_first(starts, ended={}, running={}))[:8] == "a0 b0 c0"
    ordered = longest_first(starts, ended={"a": 5, "b": 9}, running={})
    assert keys(ordered) == "c0 b0 b1 b2 a0 a1 a2 c1 c2"


def test_a_running_probe_counts_as_it_stands_and_what_moved_by_its_own_tokens() -> None:
    starts = [start("a0"), start("b0"), start("b1", num_tokens=30), start("c0")]
    ordered = longest_first(starts, ended={"a": 5}, running={"a": 90, "b": 20, "c": 2})
    assert keys(ordered) == "b1 b0 a0 c0"


@given(st.lists(st.sampled_from("abcd"), max_size=20), TOKENS, TOKENS)
def test_nobody_is_lost_and_members_of_a_group_keep_their_order(
    names: list[str], ended: dict[str, int], running: dict[str, int]
) -> None:
    starts = [start(f"{group}{i:02}") for i, group in enumerate(names)]
    ordered = longest_first(starts, ended=ended, running=running)
    assert sorted(one.key for one in ordered) == sorted(one.key for one in starts)
    for group in "abcd":
        mine = [one.key for one in ordered if one.group == group]
        assert mine == sorted(mine)


def test_where_all_fit_or_nobody_asks_they_join_in_the_order_they_came() -> None:
    asked = [start("a0"), start("a1"), start("b0")]
    for starts, num in ((asked, 3), ([start(s.key, probed=False) for s in asked], 2)):
        waiting = Waiting()
        waiting.add(starts)
        assert waiting.take(num, running=dict) == starts[:num]


def test_what_ended_is_remembered_while_somebody_waits() -> None:
    waiting = Waiting()
    waiting.add([start("a0"), start("b0"), start("a1"), start("b1"), start("a2")])
    assert keys(waiting.take(2, running=dict)) == "a0 b0"
    waiting.ended("b", num_tokens=9)
    assert keys(waiting.take(1, running=lambda: {"a": 3})) == "b1"
    waiting.ended("a", num_tokens=30)
    assert keys(waiting.take(5, running=dict)) == "a1 a2"


def test_the_order_of_joining_changes_no_token_and_probes_join_first() -> None:
    model = tiny_model(eos_token_id=3)
    starts = groups(num_groups=6, group_size=4)
    probed = [msgspec.structs.replace(one, longest_first=True) for one in starts]
    as_they_came = run(engine_of(model, max_running=6, deterministic=True), starts)
    engine = engine_of(model, max_running=6, deterministic=True)
    engine.add(probed)
    engine.step()
    joined = {*engine.held()} - {one.key for one in engine._waiting}
    assert joined <= {f"{group}/0" for group in range(6)}
    assert {**finish(engine)[0]}.items() <= as_they_came.items()
