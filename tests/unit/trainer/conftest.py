"""A gang of one, tiny models and random samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from jigsawrl.config import InitModelConfig, PipelineConfig, SortDigitsConfig, TrainerConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.tokenizer import build_tokenizer
from services.trainer.batch import Sample
from services.trainer.parallel import Gang, join_gang, leave_gang

torch.set_num_threads(1)

TINY = InitModelConfig(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_position_embeddings=64,
)
ALPHABET = "0123456789="


@pytest.fixture
def gang() -> Iterator[Gang]:
    """One rank on the CPU; a process can have one gang."""
    yield join_gang(torch.device("cpu"))
    leave_gang()


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """``make_model(seed, dtype)``: a tiny model, the same for the same seed. Its weights are made
    larger than at initialisation, where all tokens are nearly equally likely."""

    def make(seed: int = 0, dtype: torch.dtype = torch.float64) -> Any:
        model = build_model(TINY, build_tokenizer(ALPHABET), seed=seed).to(dtype).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        return model

    return make


@pytest.fixture
def samples() -> list[Sample]:
    """Five groups of two to four sequences of ragged lengths; one sequence has nothing to train, and
    one of each group has two turns with two tokens of its environment between them."""
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    made = []
    for group in range(5):
        for index in range(draw(2, 5)):
            num_prompt, length = draw(2, 5), draw(6, 14)
            mask = torch.arange(length) >= num_prompt
            if (group, index) == (2, 0):
                mask[:] = False
            versions = torch.where(torch.arange(length) >= num_prompt, 0, -1).int()
            if index == 1:
                between = slice(num_prompt + 1, num_prompt + 3)
                mask[between], versions[between] = False, -1
            made.append(
                Sample(
                    group=f"g{group}",
                    sequence=f"g{group}/s{index}",
                    num_prompt_tokens=num_prompt,
                    tokens=torch.randint(1, 13, (length,), generator=generator),
                    logprobs=-torch.rand(length, generator=generator),
                    versions=versions,
                    mask=mask,
                    reward=float(draw(0, 4)),
                    text="",
                )
            )
    return made


@pytest.fixture
def config() -> PipelineConfig:
    """A pipeline on the tiny model, without warm-up."""
    return PipelineConfig(
        name="p",
        model=TINY,
        device="cpu",
        task=SortDigitsConfig(num_held_out=5),
        trainer=TrainerConfig(num_steps=4),
    )
