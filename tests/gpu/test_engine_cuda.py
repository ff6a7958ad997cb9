"""The embedded engine on a CUDA device against transformers on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "engine"))
from engine_samples import engine_of, groups, largest_gap, run, tiny_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_logprobs_on_cuda_equal_those_of_transformers(kind: str) -> None:
    model = tiny_model(kind)
    starts = groups()
    finished = run(engine_of(model, device="cuda"), starts)
    assert largest_gap(model, starts, finished) < 1e-4


def test_bfloat16_on_cuda_stays_near_float32() -> None:
    model = tiny_model(initializer_range=0.1)
    starts = groups()
    finished = run(engine_of(model, device="cuda", dtype=torch.bfloat16), starts)
    assert largest_gap(model, starts, finished) < 0.1
