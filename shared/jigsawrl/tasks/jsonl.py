"""A file of problems: one JSON object a line with ``prompt``, ``answer`` and any other fields."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from jigsawrl.config import JsonlTaskConfig
from jigsawrl.tasks.base import Problem, Scored, SingleTurn
from jigsawrl.tasks.rewards import exact, numeric

_SCORERS: dict[str, Callable[[str, str], Scored]] = {"exact": exact, "numeric": numeric}


class Jsonl(SingleTurn):
    """Lines are held out by a hash of their prompt, so that a repeated prompt lies on one side only.

    Training goes through the other lines in a new seeded order each epoch."""

    def __init__(self, config: JsonlTaskConfig, *, seed: int) -> None:
        problems = read(Path(config.path), config.reward)
        self._seed = seed
        self._score = _SCORERS[config.reward]
        self._train = [p for p in problems if not self._is_held_out(p, config.held_out_fraction)]
        held_out = {p.prompt: p for p in problems if self._is_held_out(p, config.held_out_fraction)}
        self._held_out = list(held_out.values())
        for part, name in ((self._train, "training"), (self._held_out, "held-out")):
            if not part:
                raise ValueError(
                    f"{config.path}: no {name} problem among {len(problems)} lines; change"
                    " task.held_out_fraction or add lines"
                )
        self.num_held_out = len(self._held_out)
        texts = (text for p in problems for text in (p.prompt, p.fields["answer"]))
        self.alphabet = "".join(sorted(set().union(*texts)))

    def train(self, cursor: int) -> Problem:
        epoch, index = divmod(cursor, len(self._train))
        return self._train[self._order(epoch)[index]]

    def held_out(self, index: int) -> Problem:
        return self._held_out[index]

    def score(self, fields: dict[str, str], response: str) -> Scored:
        return self._score(fields["answer"], response)

    @lru_cache(maxsize=2)  # noqa: B019  the task lives as long as its process
    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self._train)))
        random.Random(f"{self._seed}/{epoch}").shuffle(order)
        return order

    @staticmethod
    def _is_held_out(problem: Problem, fraction: float) -> bool:
        digest = hashlib.blake2b(problem.prompt.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") < fraction * 2**64


def read(path: Path, reward: str) -> list[Problem]:
    """All problems of a file; a line that is none raises ValueError with its number."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"task.path: can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"task.path: {path} is not UTF-8 text: {error.reason}") from error
    return [
        _problem(line, reward, where=f"{path}:{number}")
        # Not splitlines(), which also cuts at characters that JSON strings may hold (U+2028).
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]


def _problem(line: str, reward: str, *, where: str) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object with prompt and answer")
    for key in ("prompt", "answer"):
        if key not in row:
            raise ValueError(f"{where}: {key!r} is missing")
    if not isinstance(row["prompt"], str) or not row["prompt"]:
        raise ValueError(f"{where}: 'prompt' must be a text that is not empty")
    if not isinstance(row["answer"], str | int | float):
        raise ValueError(f"{where}: 'answer' must be a text or a number")
    fields = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in row.items()
        if key != "prompt"
    }
    if reward == "numeric":
        try:
            numeric(fields["answer"], "")
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return Problem(prompt=row["prompt"], fields=fields)
