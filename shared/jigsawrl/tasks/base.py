"""What a task is: an endless stream of training problems, a held-out set that never overlaps it, and
a scorer; one with several turns also says what its environment answers between them. Pure functions of
(config, seed), so that every process that builds the same task sees the same problems. The environment,
the reward service and the trainer's warm-up are the callers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec


class Problem(msgspec.Struct, frozen=True):
    """One prompt and what its scorer needs."""

    prompt: str
    fields: dict[str, str]
    """``answer`` among them."""


class Scored(msgspec.Struct, frozen=True):
    """What a response is worth."""

    reward: float
    correct: bool
    """What evaluation counts."""


class Task(Protocol):
    """One task under one seed."""

    alphabet: str
    """Every character of prompts and answers, sorted: the vocabulary of a model from nothing."""
    num_held_out: int

    def train(self, cursor: int) -> Problem:
        """The training problem at `cursor` (0, 1, ...), without end."""

    def held_out(self, index: int) -> Problem:
        """The held-out problem at `index` (0 to num_held_out - 1); no training prompt equals it."""

    def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
        """What the environment says to the turns so far, never an empty text; None where the episode
        is over. It depends on nothing else, so that whoever asks again gets the same."""

    def score(self, fields: dict[str, str], response: str) -> Scored:
        """Score the text of the last turn, end-of-sequence token removed."""


class SingleTurn:
    """A task whose environment says nothing."""

    def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
        """The first answer is the last."""
        return None
