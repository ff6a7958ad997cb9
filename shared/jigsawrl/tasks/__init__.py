"""Tasks: where problems come from and how answers are scored. `build_task` is the plug-in point."""

from __future__ import annotations

from jigsawrl.config import JsonlTaskConfig, SortDigitsConfig, TaskConfig
from jigsawrl.tasks.base import Problem, Scored, Task

__all__ = ["Problem", "Scored", "Task", "build_task"]


def build_task(config: TaskConfig, *, seed: int) -> Task:
    """The task that `config` names; raises ValueError where it can't be built."""
    if isinstance(config, SortDigitsConfig):
        from jigsawrl.tasks.sort_digits import SortDigits

        return SortDigits(config, seed=seed)
    if isinstance(config, JsonlTaskConfig):
        from jigsawrl.tasks.jsonl import Jsonl

        return Jsonl(config, seed=seed)
    from jigsawrl.tasks.reasoning_gym import ReasoningGym

    return ReasoningGym(config, seed=seed)
