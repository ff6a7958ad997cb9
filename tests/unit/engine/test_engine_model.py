"""The engine's decoder against transformers."""

from __future__ import annotations

import pytest
import torch
from engine_samples import engine_of, groups, largest_gap, load, run, tiny_model

from services.rollout.engine.model import parse_config

KINDS = ["qwen3", "qwen3-tied", "llama", "llama-biased"]


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_equal_those_of_transformers(kind: str) -> None:
    model = tiny_model(kind)
    starts = groups()
    finished = run(engine_of(model), starts)
    assert len(finished) == len(starts)
    assert largest_gap(model, starts, finished) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_those_of_generate(kind: str) -> None:
    model = tiny_model(kind)
    starts = groups(group_size=1)
    finished = run(engine_of(model, greedy=True), starts)
    for start in starts:
        ids = torch.tensor([start.prompt])
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
        )
        assert finished[start.key].tokens == out[0, len(start.prompt) :].tolist()


def test_bfloat16_stays_near_float32() -> None:
    model = tiny_model(initializer_range=0.1)
    starts = groups()
    finished = run(engine_of(model, dtype=torch.bfloat16), starts)
    assert largest_gap(model, starts, finished) < 0.1


def test_a_model_that_is_neither_qwen3_nor_llama_is_refused() -> None:
    with pytest.raises(ValueError, match="runs qwen3 and llama models, not 'gpt2'"):
        parse_config('{"model_type": "gpt2"}')


def test_rotary_angles_that_depend_on_the_length_are_refused() -> None:
    model = tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    with pytest.raises(ValueError, match="can't run rotary embeddings of type 'dynamic'"):
        load(engine_of(tiny_model()), model, version=1)


def test_missing_weights_are_named() -> None:
    model = tiny_model()
    state = model.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"the weights lack model\.layers\.1\.mlp\.up_proj"):
        engine_of(model).load_weights(
            state, model_config=model.config.to_json_string(), version=1, keep_kv=True
        )
