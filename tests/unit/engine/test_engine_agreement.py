"""Finding out which numbers of rows agree, with decoders that have a known fault."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from engine_samples import engine_of, load, tiny_model
from torch import Tensor

from jigsawrl.config import (
    InitModelConfig,
    PipelineConfig,
    RolloutConfig,
    SortDigitsConfig,
    TorchEngineConfig,
    TrainerConfig,
)
from services.rollout.build import build_engine
from services.rollout.engine.agreement import DisagreementError, agreeing_sizes
from services.rollout.engine.invariant import SIZES, InvariantDecoder
from services.rollout.engine.sampling import Sampling


class FaultyForFewRows(InvariantDecoder):
    """As where a library has another kernel for fewer than 16 rows."""

    def _finish(self, x: Tensor, *others: Any) -> Tensor:
        return super()._finish(x, *others) * (1.0 if x.shape[0] >= 16 else 1.0 + 1e-6)


class FaultyByPlace(InvariantDecoder):
    """As where the last rows run in another kernel."""

    def _finish(self, x: Tensor, *others: Any) -> Tensor:
        rows = torch.arange(x.shape[0])[:, None]
        return super()._finish(x, *others) * (1.0 + 1e-6 * (rows > 3))


class FaultyBySpan(InvariantDecoder):
    """As where a long sum is split."""

    def _mix(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        mixed = super()._mix(queries, keys, values, mask)
        return mixed * (1.0 + 1e-6 * (keys.shape[1] > 64))


class FaultyInPrefill(InvariantDecoder):
    """As where many queries at once run in another kernel."""

    def _attend_prompts(self, *parts: Tensor) -> Tensor:
        return super()._attend_prompts(*parts) * (1.0 + 1e-6)


def sizes_of(kind: type[InvariantDecoder]) -> tuple[int, ...]:
    model = tiny_model()
    decoder = kind(
        model.state_dict(),
        model_config=model.config.to_json_string(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    return agreeing_sizes(decoder, Sampling(max_new_tokens=8))


def test_sizes_that_give_other_bits_are_left_out() -> None:
    assert sizes_of(FaultyForFewRows) == tuple(size for size in SIZES if size >= 16)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FaultyByPlace, "with its place in the batch"),
        (FaultyBySpan, "with the length of the longest sequence"),
        (FaultyInPrefill, "prefill and decoding of one token differ"),
    ],
)
def test_a_model_that_is_not_deterministic_here_is_refused(
    kind: type[InvariantDecoder], reason: str
) -> None:
    with pytest.raises(DisagreementError, match=reason):
        sizes_of(kind)


def test_a_head_size_that_is_no_multiple_of_4_is_refused_and_the_old_weights_stay() -> None:
    engine = engine_of(tiny_model(), deterministic=True)
    with pytest.raises(ValueError, match="a multiple of 4, not 6; set rollout"):
        load(engine, tiny_model(head_dim=6), version=1)
    assert engine.version == 0


@pytest.mark.parametrize(("deterministic", "greedy"), [(True, False), (True, True), (False, False)])
def test_the_key_of_the_config_reaches_training_and_evaluation(
    deterministic: bool, greedy: bool
) -> None:
    config = PipelineConfig(
        name="p",
        device="cpu",
        model=InitModelConfig(),
        task=SortDigitsConfig(),
        rollout=RolloutConfig(engine=TorchEngineConfig(deterministic=deterministic)),
        trainer=TrainerConfig(num_steps=1),
    )
    model = tiny_model(head_dim=6)
    engine = build_engine(config, device=None, greedy=greedy)
    refusal = pytest.raises(ValueError, match="a deterministic engine needs heads")
    with refusal if deterministic else nullcontext():
        engine.load_weights(
            model.state_dict(),
            model_config=model.config.to_json_string(),
            version=0,
            keep_kv=True,
        )
