"""What pipelines are promised: caps that are kept, weights, priorities, and contradictions."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract.spec import PipelineSpec, TermsSpec
from jigsawrl.core import invariants
from jigsawrl.core.policies import POLICIES
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.shares import equal, find
from jigsawrl.core.terms import (
    FLOOR_SHARE,
    FLOOR_SLOWDOWN,
    by_priority,
    contradiction,
    unequal,
)
from tests.unit.core.divided import DividedWorld, times_s
from tests.unit.core.hostile import check_replay, drawing
from tests.unit.core.world import Faults, World, spec

NUM_STEPS = 12


def promised(name: str, **terms: object) -> PipelineSpec:
    """One rollout worker, so that nothing merges: what is seen is the division of devices."""
    return spec(
        name,
        num_steps=NUM_STEPS,
        evaluation=None,
        num_rollout_workers=1,
        terms=TermsSpec(**terms),  # type: ignore[arg-type]
    )


@functools.cache
def times(**terms: float) -> dict[str, float]:
    """Of pipeline a with these terms beside three without."""
    return times_s([promised("a", **terms), *map(promised, "bcd")], policy="jigsaw")


@functools.cache
def alone_s() -> float:
    return times_s([promised("a")], policy="jigsaw")["a"]


@pytest.mark.parametrize("max_slowdown", [1.4, 1.8])
def test_a_capped_pipeline_stays_within_its_cap_and_the_others_pay(max_slowdown: float) -> None:
    assert times()["a"] > 1.8 * alone_s(), "without a cap it is slower than both caps allow"
    capped = times(max_slowdown=max_slowdown)
    assert capped["a"] <= max_slowdown * alone_s()
    assert sum(capped[name] for name in "bcd") > sum(times()[name] for name in "bcd")


def test_a_heavier_pipeline_ends_sooner_and_a_lighter_one_lets_the_others_go_on() -> None:
    assert times(weight=5.0)["a"] < 0.95 * times()["a"]
    others = (times(weight=0.2)[name] - times()[name] for name in "bcd")
    assert sum(others) < 0


def test_a_higher_priority_runs_nearly_as_fast_as_alone_and_a_lower_one_still_ends() -> None:
    high, low = times(priority=1), times(priority=-1)
    assert high["a"] < 1.25 * alone_s()
    assert low["a"] > max(low[name] for name in "bcd")


@drawing(6)
@given(
    priorities=st.lists(st.integers(-2, 2), min_size=2, max_size=4),
    kill=st.sampled_from([0.0, 0.03]),
    seed=st.integers(0, 1 << 32),
)
def test_under_any_priorities_nobody_starves_and_a_replay_agrees(
    priorities: list[int], kill: float, seed: int
) -> None:
    pipelines = [
        spec(f"p{i}", num_steps=3, terms=TermsSpec(priority=priority))
        for i, priority in enumerate(priorities)
    ]
    world = World(seed=seed, faults=Faults(kill_per_s=kill), pipelines=pipelines, policy="jigsaw")
    world.run()
    states = world.scheduler.state.pipelines
    assert [p.stage for p in states.values()] == ["finished"] * len(pipelines)
    by_name = {p.name: p.terms.priority for p in pipelines}
    for command in (one for issued in world.issued for one in issued):
        if isinstance(command, c.SetShares):
            ranks = {name: by_name[name.partition(".")[0]] for name, _ in command.shares}
            most = max(share for _, share in command.shares)
            served = {ranks[name] for name, share in command.shares if share == most}
            for name, share in command.shares:
                # Held is only who waits for one of its own priority, and never for long.
                assert share >= FLOOR_SHARE - 1e-9 or ranks[name] in served, command
    check_replay(world)
    invariants.check(world.scheduler.state)


class Watched(DividedWorld):
    """Compares, after every decision pass, how all devices are divided with how they should be."""

    num_unequal, num_late = 0, 0

    def publish(self, event: e.Event) -> None:
        before_s = self.scheduler.state.decided_s
        super().publish(event)
        state = self.scheduler.state
        if state.decided_s == before_s:
            return
        even = equal(state)
        wanted = {device: state.outlooks.wanted.get(device, even[device]) for device in even}
        for device, shares in by_priority(state, wanted).items():
            divided = {name: find(state, name).share for name in shares}  # type: ignore[union-attr]
            assert divided == pytest.approx(shares), device
        self.num_unequal += len(unequal(state))
        self.num_late += bool(state.outlooks.late)


@pytest.mark.parametrize("terms", [{"priority": 1}, {"max_slowdown": 1.6}])
def test_who_comes_first_is_asked_again_on_every_device_whenever_somebody_s_work_changes(
    terms: dict[str, float],
) -> None:
    pipelines = [
        spec(
            name,
            num_steps=5,
            groups_per_batch=10,
            evaluation=None,
            num_rollout_workers=5,
            terms=promises,
        )
        for name, promises in (
            ("a", TermsSpec(**terms)),  # type: ignore[arg-type]
            ("b", TermsSpec()),
            ("c", TermsSpec()),
        )
    ]
    world = Watched(pipelines, policy="jigsaw", num_devices=6)
    world.run()
    assert world.num_unequal
    assert bool(world.num_late) == ("max_slowdown" in terms)
    assert [p.stage for p in world.scheduler.state.pipelines.values()] == ["finished"] * 3
    check_replay(world)


@pytest.mark.parametrize("policy", ["serial", "areal"])
def test_the_next_pipeline_is_the_one_of_the_highest_priority(policy: str) -> None:
    names = {"a": 0, "b": 0, "c": 5}
    pipelines = [
        spec(name, num_steps=1, terms=TermsSpec(priority=priority))
        for name, priority in names.items()
    ]
    world = World(seed=0, faults=Faults(), pipelines=pipelines, policy=policy)
    world.run()
    started = [x.pipeline for batch in world.issued for x in batch if isinstance(x, c.StartTenant)]
    assert list(dict.fromkeys(started)) == ["c", "a", "b"]
    invariants.check(world.scheduler.state)


def reason(one: PipelineSpec, *others: PipelineSpec, policy: str = "jigsaw") -> str | None:
    keeps = POLICIES[policy].keeps_terms
    return contradiction(one, others, policy=policy, keeps_terms=keeps)


def test_promises_without_effect_and_contradictory_ones_are_told_in_one_line() -> None:
    capped = promised("low", max_slowdown=2.0)
    high = promised("high", priority=1)
    for why in (reason(capped, high), reason(high, capped)):
        assert why is not None
        assert "scheduling.max_slowdown 2 of pipeline low" in why
        assert "high" in why
        assert "\n" not in why
    assert reason(promised("low", max_slowdown=FLOOR_SLOWDOWN), high) is None
    assert reason(promised("low", max_slowdown=2.0, priority=1), high) is None
    assert reason(promised("a", priority=3), policy="serial") is None
    for one in (capped, promised("low", weight=2.0)):
        why = reason(one, policy="serial")
        assert why is not None
        assert "has no effect with --policy serial" in why


def test_a_contradiction_at_submission_fails_that_pipeline_only() -> None:
    scheduler = Scheduler()
    events: list[e.Event] = [
        e.LeaderElected(id="l", leader="s", code_version="1", policy="jigsaw"),
        *(
            e.PipelineSubmitted(id=f"s{one.name}", pipeline=one.name, spec=one, config=b"")
            for one in (promised("low", max_slowdown=2.0), promised("high", priority=1))
        ),
    ]
    for number, event in enumerate(events, 1):
        scheduler.handle(event, timestamp_s=float(number), sequence=number)
    low, high = scheduler.state.pipelines.values()
    assert (low.stage, high.stage) == ("queued", "failed")
    assert "can't be kept next to pipeline high" in (high.failure or "")
    invariants.check(scheduler.state)
