"""The tables of tasks, and what their environments do between turns. See `config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from jigsawrl.config_base import NonNegativeFloat, PositiveInt, Table


class SortDigitsConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="sort-digits"):
    """Prompt ``3142=``, answer ``1234``: sort digits (repeats allowed). Reward 1 if exact.

    With several turns a wrong answer is marked position by position and tried again."""

    min_digits: PositiveInt = 4
    max_digits: PositiveInt = 8
    num_held_out: PositiveInt = 500
    num_turns: PositiveInt = 1
    """Answers that the model may give; the last one counts."""
    turn_delay_s: NonNegativeFloat = 0.0
    """Benchmarks only: how long the environment thinks before it marks an answer, as a slow one
    (a compiler, a browser) would."""

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits {self.max_digits}")


class JsonlTaskConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="jsonl"):
    """One JSON object a line with ``prompt``, ``answer`` and any other fields."""

    path: str
    reward: Literal["exact", "numeric"]
    held_out_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Share of the lines that are kept for evaluation, chosen by a hash of the prompt."""


class ReasoningGymConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="reasoning-gym"):
    """One family of the reasoning-gym package, scored by its own scorer."""

    family: Literal["basic_arithmetic", "chain_sum", "number_sorting"]
    options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Passed to the family's own config."""
    num_held_out: PositiveInt = 200


class TaskTurns(NamedTuple):
    """How the environment of a task takes part in its sequences."""

    num_turns: int = 1
    """Of the model, at most; the environment may end an episode earlier."""
    delay_s: float = 0.0
    """Before the environment answers a turn."""
    max_observation_tokens: int = 0
    """Of what the environment says between two turns."""


TaskConfig = SortDigitsConfig | JsonlTaskConfig | ReasoningGymConfig


def turns_of(task: TaskConfig) -> TaskTurns:
    """A task whose environment says nothing has one turn."""
    if not isinstance(task, SortDigitsConfig) or task.num_turns == 1:
        return TaskTurns()
    # A mark for each digit and the sign that ends a prompt; no tokenizer needs more tokens than those.
    return TaskTurns(task.num_turns, task.turn_delay_s, task.max_digits + 1)
