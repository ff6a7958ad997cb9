"""Sort digits: prompt ``3142=``, answer ``1234``. Small enough to learn on one core in a minute,
hard enough that a warmed-up model is wrong half of the time.

With several turns the environment marks a wrong answer and the model tries again: prompt ``3142=``,
answer ``1324``, marks ``+--+=``, answer ``1234``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

from jigsawrl.config import SortDigitsConfig
from jigsawrl.tasks.base import Problem, Scored
from jigsawrl.tasks.rewards import exact


class SortDigits:
    """The training stream draws by a hash of (seed, cursor) and skips held-out prompts."""

    def __init__(self, config: SortDigitsConfig, *, seed: int) -> None:
        self._config = config
        self._seed = seed
        self.alphabet = "0123456789=" if config.num_turns == 1 else "+-0123456789="
        # Prompts of n digits that exist; a held-out set must leave most of them for training.
        num_prompts = sum(10**n for n in range(config.min_digits, config.max_digits + 1))
        if config.num_held_out * 2 > num_prompts:
            raise ValueError(
                f"task.num_held_out: {config.num_held_out} is over half of the {num_prompts}"
                " prompts there are; lower it or raise task.max_digits"
            )
        self.num_held_out = config.num_held_out
        self._held_out = self._draw_held_out()
        self._held_out_prompts = {problem.prompt for problem in self._held_out}

    def train(self, cursor: int) -> Problem:
        attempt = 0
        while True:
            problem = self._draw("train", cursor, attempt)
            if problem.prompt not in self._held_out_prompts:
                return problem
            attempt += 1

    def held_out(self, index: int) -> Problem:
        return self._held_out[index]

    def observe(self, fields: dict[str, str], responses: Sequence[str]) -> str | None:
        """For each position of the right answer whether the last one has it right, and ``=``."""
        answer, given = fields["answer"], responses[-1].strip()
        if len(responses) >= self._config.num_turns or self.score(fields, given).correct:
            return None
        pairs = zip_longest(answer, given[: len(answer)])
        return "".join("+" if right == said else "-" for right, said in pairs) + "="

    def score(self, fields: dict[str, str], response: str) -> Scored:
        return exact(fields["answer"], response)

    def _draw_held_out(self) -> list[Problem]:
        problems: dict[str, Problem] = {}
        index = 0
        while len(problems) < self.num_held_out:
            problem = self._draw("held-out", index, 0)
            problems.setdefault(problem.prompt, problem)
            index += 1
        return list(problems.values())

    def _draw(self, part: str, index: int, attempt: int) -> Problem:
        key = f"{self._seed}/{part}/{index}/{attempt}".encode()
        draws = hashlib.blake2b(key, digest_size=64).digest()
        config = self._config
        spread = config.max_digits - config.min_digits + 1
        num_digits = config.min_digits + int.from_bytes(draws[:8], "little") % spread
        number = int.from_bytes(draws[8:], "little") % 10**num_digits
        digits = str(number).zfill(num_digits)
        return Problem(prompt=f"{digits}=", fields={"answer": "".join(sorted(digits))})
