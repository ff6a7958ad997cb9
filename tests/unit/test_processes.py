"""When a crashed child is started again, and when it is given up."""

from __future__ import annotations

import pytest

from jigsawrl import processes
from jigsawrl.processes import Restarts


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds; its one entry is what the supervisor reads."""
    now_s = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: now_s[0])
    return now_s


def die(restarts: Restarts, clock: list[float], *, after_s: float) -> float | None:
    restarts.started()
    clock[0] += after_s
    return restarts.pause_s()


def test_pauses_double_and_the_fifth_failure_in_a_row_ends_it(clock: list[float]) -> None:
    restarts = Restarts()
    pauses_s = [die(restarts, clock, after_s=1) for _ in range(5)]
    assert pauses_s == [0.2, 0.4, 0.8, 1.6, None]


def test_a_fault_that_takes_long_to_show_ends_too(clock: list[float]) -> None:
    restarts = Restarts()
    assert [die(restarts, clock, after_s=50) for _ in range(5)][-1] is None


def test_a_long_life_begins_a_new_row(clock: list[float]) -> None:
    restarts = Restarts()
    lives_s = [1, 1, 1, 61, 1, 1, 1, 1]
    pauses_s = [die(restarts, clock, after_s=life_s) for life_s in lives_s]
    assert pauses_s == [0.2, 0.4, 0.8, 0.2, 0.4, 0.8, 1.6, None]
