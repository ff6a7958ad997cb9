"""Families of the reasoning-gym package (https://github.com/open-thought/reasoning-gym), with their
own generators and scorers."""

from __future__ import annotations

import string
from functools import lru_cache
from typing import Any

import msgspec

from jigsawrl.config import ReasoningGymConfig
from jigsawrl.tasks.base import Problem, Scored, SingleTurn

TRAIN_SIZE = 1_000_000_000
"""Training problems of a family, drawn when they are asked for: the number costs nothing."""
SEED_SPACING = 10 * TRAIN_SIZE
"""The package draws problem i of seed s from ``Random(s + i)``: nearer seeds would share problems."""
CORRECT_SCORE = 0.99
"""A family's score at or above which an answer counts as correct; partial credit lies below."""


class ReasoningGym(SingleTurn):
    """Training and held-out problems come from different generator seeds; a training prompt that
    equals a held-out one is passed over."""

    def __init__(self, config: ReasoningGymConfig, *, seed: int) -> None:
        self._train = _dataset(config, seed=2 * seed * SEED_SPACING, size=TRAIN_SIZE)
        self.num_held_out = config.num_held_out
        # Small families repeat prompts: draw more than asked, keep the first distinct ones.
        pool = _dataset(config, seed=(2 * seed + 1) * SEED_SPACING, size=20 * config.num_held_out)
        held_out: dict[str, Problem] = {}
        for index in range(20 * config.num_held_out):
            if len(held_out) == config.num_held_out:
                break
            problem = _problem(pool[index])
            held_out.setdefault(problem.prompt, problem)
        if len(held_out) < config.num_held_out:
            raise ValueError(
                f"task.num_held_out: {config.family} with these options gives only"
                f" {len(held_out)} distinct prompts"
            )
        self._held_out = list(held_out.values())
        self._held_out_prompts = set(held_out)
        self.alphabet = string.printable[:95] + "\n"

    def train(self, cursor: int) -> Problem:
        # Strides of a large odd number walk through other indices when one is held out.
        for attempt in range(1000):
            problem = self._cached((cursor + attempt * 500_000_003) % TRAIN_SIZE)
            if problem.prompt not in self._held_out_prompts:
                return problem
        raise ValueError("task: nearly all prompts of this family are held out; vary its options")

    def held_out(self, index: int) -> Problem:
        return self._held_out[index]

    def score(self, fields: dict[str, str], response: str) -> Scored:
        entry: dict[str, Any] = msgspec.json.decode(fields["entry"])
        reward = float(self._train.score_answer(answer=response.strip(), entry=entry))
        return Scored(reward=reward, correct=reward >= CORRECT_SCORE)

    @lru_cache(maxsize=4096)  # noqa: B019  the task lives as long as its process
    def _cached(self, index: int) -> Problem:
        return _problem(self._train[index])


def _dataset(config: ReasoningGymConfig, *, seed: int, size: int) -> Any:
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(config.family, seed=seed, size=size, **config.options)
    except (TypeError, AssertionError, ValueError) as error:
        raise ValueError(f"task.options: {config.family} refuses them: {error}") from error


def _problem(entry: dict[str, Any]) -> Problem:
    encoded = msgspec.json.encode(entry, enc_hook=str).decode()
    return Problem(
        prompt=f"{entry['question']}\n",
        fields={"answer": str(entry["answer"]), "entry": encoded},
    )
