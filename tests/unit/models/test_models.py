"""Tokenizers, loading, export and packed weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from jigsawrl.config import InitModelConfig, PathModelConfig
from jigsawrl.models.init import build_model
from jigsawrl.models.loading import export_checkpoint, load_model, model_from_config
from jigsawrl.models.tokenizer import build_tokenizer, decode, encode, load_tokenizer
from jigsawrl.models.weights import pack, unpack

ALPHABET = "0123456789= \n"
SMALL = InitModelConfig(
    hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16
)


def small_model() -> tuple[Any, Any]:
    tokenizer = build_tokenizer(ALPHABET)
    return build_model(SMALL, tokenizer, seed=1), tokenizer


def test_every_character_is_one_token_and_text_survives() -> None:
    tokenizer = build_tokenizer(ALPHABET)
    text = " 12 = 3\n 4"
    ids = encode(tokenizer, text)
    assert len(ids) == len(text)
    assert decode(tokenizer, [*ids, tokenizer.eos_token_id]) == text
    assert build_tokenizer(ALPHABET[::-1]).get_vocab() == tokenizer.get_vocab()


def test_a_character_outside_the_alphabet_is_an_error_not_a_gap() -> None:
    with pytest.raises(ValueError, match="no tokens for '1x'"):
        encode(build_tokenizer("01"), "1x")


def test_the_same_seed_builds_the_same_model_and_leaves_the_generator_alone() -> None:
    before = torch.random.get_rng_state()
    first, _ = small_model()
    second, _ = small_model()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True)
    )


def test_an_exported_checkpoint_loads_with_transformers_and_with_us(tmp_path: Path) -> None:
    model, tokenizer = small_model()
    export_checkpoint(tmp_path, model, tokenizer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.tensor([encode(AutoTokenizer.from_pretrained(tmp_path), "31=")])
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
        ours = load_model(str(tmp_path), dtype=torch.float32)
        assert torch.equal(ours(ids).logits, model(ids).logits)
    config = PathModelConfig(path=str(tmp_path))
    assert load_tokenizer(config, "").get_vocab() == tokenizer.get_vocab()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_survive_the_channel_bit_for_bit(dtype: torch.dtype) -> None:
    model = small_model()[0].to(dtype)
    config = model.config.to_json_string()
    manifest, payload = pack(
        model.state_dict(), pipeline="p", incarnation=0, version=3, model_config=config
    )
    twin = model_from_config(manifest.model_config, dtype=dtype)
    twin.load_state_dict(unpack(manifest, bytearray(payload)))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, twin.state_dict()[name]), name


def test_a_missing_checkpoint_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint in .*config\.json"):
        load_model(str(tmp_path / "nowhere"), dtype=torch.float32)


def test_corrupt_weights_are_refused_in_one_line(tmp_path: Path) -> None:
    model, tokenizer = small_model()
    export_checkpoint(tmp_path, model, tokenizer)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="can't be loaded") as caught:
        load_model(str(tmp_path), dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="'gpt2' model; supported are qwen3, llama"):
        load_model(str(tmp_path), dtype=torch.float32)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    build_tokenizer("0123456789abcdef").save_pretrained(tmp_path)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(
        LlamaConfig(vocab_size=8, intermediate_size=16, **shape)  # type: ignore[arg-type]
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="token ids up to 17, the model only 8"):
        load_tokenizer(PathModelConfig(path=str(tmp_path)), "")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    small_model()[0].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer in"):
        load_tokenizer(PathModelConfig(path=str(tmp_path)), "")
