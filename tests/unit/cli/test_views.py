"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from jigsawrl.cli.live_view import LiveView
from jigsawrl.cli.plain_view import PlainView
from tests.unit.cli.statuses import FINISHED, activity, status


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def plain(lines: list[str]) -> PlainView:
    return PlainView(lines.append)


def test_each_step_is_one_line_however_often_it_is_seen(plain: PlainView, lines: list[str]) -> None:
    for version in (0, 0, 1, 1, 2, 2):
        metrics = {"reward_mean": 0.5 + version / 10} if version else {}
        plain.on_status(status(version=version, metrics=metrics), now_s=float(version))
    assert lines == [
        "[tiny] running",
        "[tiny] step 1 of 3  reward_mean 0.6",
        "[tiny] step 2 of 3  reward_mean 0.7",
    ]


def test_steps_between_two_looks_share_a_line_and_a_rollback_is_told(
    plain: PlainView, lines: list[str]
) -> None:
    plain.on_status(status(), now_s=0)
    plain.on_status(status(version=2), now_s=1)
    plain.on_status(status(version=1, incarnation=1), now_s=2)
    assert lines[1:] == ["[tiny] steps 1-2 of 3", "[tiny] back to version 1 (incarnation 1)"]


def test_progress_comes_at_most_every_two_seconds(plain: PlainView, lines: list[str]) -> None:
    for tenth in range(45):
        plain.on_activity(activity(tenth), now_s=tenth / 10)
    assert lines == [
        f"[tiny] tiny.trainer0: warm-up {done} / 4000, accuracy 0.31" for done in (0, 20, 40)
    ]


def test_a_wait_is_named_once_when_it_is_long(plain: PlainView, lines: list[str]) -> None:
    for second in range(0, 30, 5):
        plain.on_status(status(waiting_for=("tiny/g3/s1 on tiny.rollout0",)), now_s=second)
    plain.on_status(status(), now_s=30)
    assert lines[1:] == ["[tiny] waiting for tiny/g3/s1 on tiny.rollout0 (10 s)"]


def test_each_evaluation_is_told_once(plain: PlainView, lines: list[str]) -> None:
    plain.on_status(status(**FINISHED), now_s=0)
    plain.on_status(status(**FINISHED), now_s=1)
    assert [line for line in lines if "accuracy" in line] == [
        "[tiny] version 0: held-out accuracy 0.500 on 8 problems",
        "[tiny] version 3: held-out accuracy 0.750 on 8 problems",
    ]


def test_the_live_picture_shows_progress_activity_waits_and_workers() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=100, force_terminal=True))
    view.on_activity(activity(120), now_s=1.0)
    view.on_notice("node ended with status 1; starting it again")
    waiting = tuple(f"tiny/g{number}" for number in range(5))
    changed = FINISHED | {"state": "running", "waiting_for": waiting}
    view.on_status(status(num_dead_letters=1, **changed), now_s=2.0)
    view.close()
    shown = output.getvalue()
    for text in (
        "step 3 / 3",
        "250 tokens/s",
        "v3: 0.750",
        "warm-up 120 / 4000",
        "tiny/g2; 2 more",
        "tiny.rollout0",
        "dead letters: 1",
        "starting it again",
    ):
        assert text in shown, text


def test_the_live_picture_says_paused_and_leaves_out_workers_that_are_gone() -> None:
    output = io.StringIO()
    view = LiveView(Console(file=output, width=100, force_terminal=True))
    view.on_status(status(**FINISHED), now_s=1.0)
    assert "tiny.rollout0" not in output.getvalue()
    view.on_status(status(paused=True), now_s=2.0)
    view.close()
    assert "paused" in output.getvalue()
