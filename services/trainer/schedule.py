"""The learning rate of each step, as a pure function of the version that the step starts from: so a
restored trainer needs no scheduler state."""

from __future__ import annotations

import math

from jigsawrl.config import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
)

ScheduleConfig = ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig


def learning_rate(
    config: ScheduleConfig, *, version: int, num_steps: int, base_learning_rate: float
) -> float:
    """A linear rise over ``warmup_steps`` (the first step is not 0), then the schedule; the last step
    (`version` = `num_steps` - 1) has exactly the final fraction."""
    if version < config.warmup_steps:
        return base_learning_rate * (version + 1) / config.warmup_steps
    if isinstance(config, ConstantScheduleConfig):
        return base_learning_rate
    num_falling = max(num_steps - 1 - config.warmup_steps, 1)
    progress = min((version - config.warmup_steps) / num_falling, 1.0)
    if isinstance(config, LinearScheduleConfig):
        remaining = 1 - progress
    else:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    final = config.final_fraction
    return base_learning_rate * (final + (1 - final) * remaining)
