"""What a repeated request means, for as long as it may be repeated."""

from __future__ import annotations

from services.scheduler.meanings import Meanings


def test_a_repeat_means_the_submission_of_its_first_time() -> None:
    meanings = Meanings()
    assert meanings.is_meant("r1", submission="s1")
    assert meanings.is_meant("r1", submission="s1")
    assert not meanings.is_meant("r1", submission="s2")


def test_only_the_newest_requests_are_remembered() -> None:
    meanings = Meanings(max_requests=3)
    for number in range(10):
        assert meanings.is_meant(f"r{number}", submission="s1")
    assert len(meanings) == 3
    assert not meanings.is_meant("r9", submission="s2")
