"""Scorers that a task can name: exact text and numeric value."""

from __future__ import annotations

import math
import re

from jigsawrl.tasks.base import Scored

_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")

RELATIVE_TOLERANCE = 1e-6


def exact(answer: str, response: str) -> Scored:
    """1 where the texts are equal but for white space at the ends, else 0."""
    correct = response.strip() == answer.strip()
    return Scored(reward=float(correct), correct=correct)


def numeric(answer: str, response: str) -> Scored:
    """1 where the last number of the response equals the answer's, else 0.

    Thousands separators are understood; equality is to 1e-6 relative."""
    wanted, given = last_number(answer), last_number(response)
    if wanted is None:
        raise ValueError(f'the answer {answer!r} holds no number; use reward = "exact"')
    correct = given is not None and math.isclose(
        wanted, given, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE
    )
    return Scored(reward=float(correct), correct=correct)


def last_number(text: str) -> float | None:
    """The last number written in `text`."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
