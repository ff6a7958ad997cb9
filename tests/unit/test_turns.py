"""Turns, read from the versions of tokens."""

from __future__ import annotations

import pytest

from jigsawrl.turns import current_turn, turn_spans


@pytest.mark.parametrize(
    ("versions", "spans", "current"),
    [
        ([], [], (0, 0)),
        ([0], [(0, 1)], (0, 0)),
        ([3, 3, 4], [(0, 3)], (0, 0)),
        ([3, 4, -1, -1], [(0, 2)], (1, 4)),
        ([3, 4, -1, -1, 5], [(0, 2), (4, 5)], (1, 4)),
        ([3, -1, 3, 3, -1, -1, 4, 4], [(0, 1), (2, 4), (6, 8)], (2, 6)),
    ],
)
def test_a_turn_is_a_run_of_generated_tokens(
    versions: list[int], spans: list[tuple[int, int]], current: tuple[int, int]
) -> None:
    assert turn_spans(versions) == spans
    assert current_turn(versions) == current


def test_a_prompt_is_no_turn() -> None:
    assert turn_spans([-1, -1, 0, 0, -1, 1]) == [(2, 4), (5, 6)]
