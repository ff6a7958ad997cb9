"""What sub-stages cost on this machine."""

from __future__ import annotations

import os

import pytest

from jigsawrl.config import InitModelConfig, PipelineConfig, SortDigitsConfig, TrainerConfig
from jigsawrl.core.slowdown import LEVELS, SlowdownProfile, SlowdownTable
from loadgen.profile.__main__ import decode_cost_s, slowdown_rows

pytestmark = pytest.mark.slow

CONFIG = PipelineConfig(
    name="p",
    model=InitModelConfig(hidden_size=32, intermediate_size=48, num_layers=1),
    task=SortDigitsConfig(),
    trainer=TrainerConfig(num_steps=1),
)


def test_two_kinds_beside_each_other_give_a_table_that_the_scheduler_can_use() -> None:
    kinds = ("tail_decode", "forward_backward")
    core = max(os.sched_getaffinity(0))
    said: list[str] = []
    rows = slowdown_rows(CONFIG, core=core, say=said.append, kinds=kinds, window_s=0.3)
    profile = SlowdownProfile(device_kind="cpu", source="test", rows=tuple(rows))
    table = SlowdownTable(profile)
    pairs = {(row.kind, row.beside, row.share) for row in rows}
    assert len(pairs) == len(rows) == (2 + 1 + 1) * len(LEVELS[:-1])
    assert all(0 < row.speed <= 1 for row in rows)
    for kind in kinds:
        less, more = (
            table.speed(kind, share=share, beside=("forward_backward", 1 - share))
            for share in (0.25, 0.75)
        )
        assert less < more, "three quarters of a core are more than one"
    assert said


def test_an_iteration_over_many_sequences_costs_more_than_over_one() -> None:
    assert decode_cost_s(CONFIG, 64) > decode_cost_s(CONFIG, 1) > 0
