"""When a crashed child is started again, and when it is given up."""

from __future__ import annotations

from jigsawrl.processes import Restarts


class Life:
    """One child and the seconds that it lives."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._restarts = Restarts(clock=lambda: self._now_s)

    def die(self, *, after_s: float) -> float | None:
        """The pause before the next start."""
        self._restarts.started()
        self._now_s += after_s
        return self._restarts.pause_s()


def test_pauses_double_and_the_fifth_failure_in_a_row_ends_it() -> None:
    child = Life()
    pauses_s = [child.die(after_s=1) for _ in range(5)]
    assert pauses_s == [0.2, 0.4, 0.8, 1.6, None]


def test_a_fault_that_takes_long_to_show_ends_too() -> None:
    child = Life()
    assert [child.die(after_s=50) for _ in range(5)][-1] is None


def test_a_long_life_begins_a_new_row() -> None:
    child = Life()
    lives_s = [1, 1, 1, 61, 1, 1, 1, 1]
    pauses_s = [child.die(after_s=life_s) for life_s in lives_s]
    assert pauses_s == [0.2, 0.4, 0.8, 0.2, 0.4, 0.8, 1.6, None]
