"""Waiting is counted once, and only where nothing is done meanwhile."""

from __future__ import annotations

from services.rollout.turns import ToolWait
from services.substages import LastWait, SubStages, Wait


def test_a_wait_is_one_span_of_the_version_that_it_began_with() -> None:
    substages = SubStages()
    wait = Wait("tool_wait", substages)
    wait.cut()
    assert substages.take() == ()
    wait.of_version(3)
    wait.runs(True)
    wait.runs(True)  # of a second thing that is waited for
    wait.runs(False)
    wait.of_version(4)
    (span,) = substages.take()
    assert (span.kind, span.version, span.num_tokens) == ("tool_wait", 3, 0)
    assert 0 < span.duration_s <= span.ended_s - span.started_s + 1e-3


def test_a_wait_that_lasts_is_told_in_parts() -> None:
    substages = SubStages()
    wait = Wait("tool_wait", substages)
    wait.runs(True)
    for _ in range(3):
        wait.cut()
        assert len(substages.take()) == 1
    wait.runs(False)
    substages.take()
    wait.cut()
    assert substages.take() == ()


def test_what_waits_for_its_environment_while_others_generate_costs_nothing() -> None:
    substages = SubStages()
    wait = ToolWait(substages)
    wait.engine_is(idle=False)
    wait.sequences_are(waiting=True)
    wait.cut()
    assert substages.take() == ()
    wait.engine_is(idle=True)
    wait.cut()
    assert [span.kind for span in substages.take()] == ["tool_wait"]
    wait.sequences_are(waiting=False)
    substages.take()
    wait.cut()
    assert substages.take() == ()


def test_of_the_waits_of_a_version_the_last_one_counts() -> None:
    substages = SubStages()
    wait = LastWait("reward_wait", substages)
    for version, duration_s in ((3, 0.5), (3, 0.25), (4, 1.0), (4, 0.125)):
        wait.ended(version=version, started_s=10.0, duration_s=duration_s)
    (span,) = substages.take()
    assert (span.kind, span.version) == ("reward_wait", 3)
    assert (span.started_s, span.ended_s, span.duration_s) == (10.0, 10.25, 0.25)
    wait.ended(version=5, started_s=11.0, duration_s=2.0)
    assert [(span.version, span.duration_s) for span in substages.take()] == [(4, 0.125)]
