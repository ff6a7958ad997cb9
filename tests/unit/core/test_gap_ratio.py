"""The planner of the policy `rlix`: devices follow work, and whatever it plans can be carried out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.core.policies.gap_ratio import Active, Demand, Worker, gap_ratio, out_of_balance

DEVICES = [f"d{i}" for i in range(8)]


def demand(
    name: str, remaining: int, devices: list[str], *, active: tuple[int, ...] = (), step: int = 12
) -> Demand:
    workers = tuple(Worker(f"{name}.{i}", device) for i, device in enumerate(devices))
    return Demand(
        pipeline=name,
        remaining=remaining,
        fraction=remaining / step,
        workers=workers,
        active=tuple(workers[i].id for i in active),
    )


def again(demands: list[Demand], planned: Active) -> list[Demand]:
    """The same demands once the plan is carried out."""
    return [
        Demand(
            pipeline=d.pipeline,
            remaining=d.remaining,
            fraction=d.fraction,
            workers=d.workers,
            active=planned[d.pipeline],
        )
        for d in demands
    ]


def devices_of(demands: list[Demand], planned: Active) -> list[str]:
    where = {worker.id: worker.device for d in demands for worker in d.workers}
    return [where[name] for names in planned.values() for name in names]


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Demand], list[str]]:
    """Pipelines with workers here and there, some of them active; some devices not to be had."""
    demands: list[Demand] = []
    owned: set[str] = set()
    for number in range(draw(st.integers(1, 4))):
        devices = draw(st.lists(st.sampled_from(DEVICES), max_size=6))
        active = []
        for rank, device in enumerate(devices):
            if device not in owned and draw(st.booleans()):
                owned.add(device)
                active.append(rank)
        remaining = draw(st.integers(0, 30))
        demands.append(demand(f"p{number}", remaining, devices, active=tuple(active)))
    rest = [device for device in DEVICES if device not in owned]
    return demands, [device for device in rest if draw(st.booleans())]


@given(situations())
def test_no_device_has_two_owners_and_none_comes_from_nowhere(
    situation: tuple[list[Demand], list[str]],
) -> None:
    demands, idle = situation
    planned = gap_ratio(demands, idle=idle)
    used = devices_of(demands, planned)
    before = devices_of(demands, {d.pipeline: d.active for d in demands})
    assert len(set(used)) == len(used)
    assert set(before) <= set(used) <= {*before, *idle}, "a device that was in use stays in use"


@given(situations())
def test_who_has_work_to_do_keeps_its_floor_and_gets_no_more_than_its_target(
    situation: tuple[list[Demand], list[str]],
) -> None:
    demands, idle = situation
    planned = gap_ratio(demands, idle=idle)
    budget = len(idle) + sum(len(d.active) for d in demands)
    total = sum(d.remaining for d in demands)
    for one in demands:
        before, after = len(one.active), len(planned[one.pipeline])
        wanted = 0
        if one.remaining:
            wanted = max(1, math.floor(one.remaining / total * budget + 0.5))
        assert after >= min(before, wanted)
        assert after <= max(before, wanted)


@given(situations())
def test_planning_on_and_on_comes_to_rest(situation: tuple[list[Demand], list[str]]) -> None:
    demands, idle = situation
    for _ in range(len(DEVICES) + 1):
        planned = gap_ratio(demands, idle=idle)
        if planned == {d.pipeline: d.active for d in demands}:
            return
        demands = again(demands, planned)
        idle = [device for device in idle if device not in devices_of(demands, planned)]
    raise AssertionError(f"it still changes: {planned}")


def test_devices_follow_work() -> None:
    demands = [demand("a", 30, DEVICES[:4]), demand("b", 10, DEVICES[:4])]
    planned = gap_ratio(demands, idle=DEVICES[:4])
    assert {name: len(active) for name, active in planned.items()} == {"a": 3, "b": 1}


def test_targets_are_whole_workers_one_at_least_and_bound_what_is_given() -> None:
    demands = [demand("a", 1, ["d0"]), demand("b", 99, ["d0", "d1"])]
    planned = gap_ratio(demands, idle=["d0", "d1"])
    assert planned == {"a": (), "b": ("b.0", "b.1")}, "the one furthest behind comes first"
    demands = [demand("a", 1, ["d0"]), demand("b", 99, ["d0", "d1"], active=(0, 1))]
    assert gap_ratio(demands, idle=[])["a"] == (), "b's share of 1.98 is rounded to 2: its floor"
    demands = [demand("a", 30, ["d0"]), demand("b", 70, ["d0", "d1"], active=(0, 1))]
    assert gap_ratio(demands, idle=[]) == {"a": ("a.0",), "b": ("b.1",)}


def test_an_idle_device_is_taken_before_one_in_use_and_the_lowest_rank_of_equals() -> None:
    demands = [
        demand("a", 10, ["d0", "d1", "d2"]),
        demand("b", 10, ["d0"], active=(0,)),
    ]
    assert gap_ratio(demands, idle=["d1", "d2"])["a"] == ("a.1", "a.2")
    demands = [demand("a", 10, ["d0", "d1"]), demand("b", 30, ["d2", "d3"], active=(0, 1))]
    assert gap_ratio(demands, idle=["d0", "d1"])["a"] == ("a.0",)


def test_the_donor_furthest_from_its_end_gives() -> None:
    demands = [
        demand("near", 10, ["d0", "d1"], active=(0, 1), step=100),
        demand("far", 10, ["d2", "d3"], active=(0, 1), step=10),
        demand("new", 10, ["d0", "d2"]),
    ]
    planned = gap_ratio(demands, idle=[])
    assert planned == {"near": ("near.0", "near.1"), "far": ("far.1",), "new": ("new.1",)}


def test_who_has_nothing_left_to_do_gives_all() -> None:
    demands = [demand("a", 0, ["d0", "d1"], active=(0, 1)), demand("b", 10, ["d0", "d1"])]
    assert gap_ratio(demands, idle=[]) == {"a": (), "b": ("b.0", "b.1")}


def test_out_of_balance_is_a_pipeline_without_workers_or_ten_points_in_the_half_behind() -> None:
    assert out_of_balance([demand("a", 5, ["d0"])])
    assert not out_of_balance([demand("a", 0, ["d0"])])
    even = [demand("a", 11, ["d0"], active=(0,)), demand("b", 9, ["d1"], active=(0,))]
    assert not out_of_balance(even), "five points"
    odd = [demand("a", 13, ["d0"], active=(0,)), demand("b", 7, ["d1"], active=(0,))]
    assert out_of_balance(odd), "fifteen points"
