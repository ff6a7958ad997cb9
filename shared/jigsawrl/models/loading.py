"""Torch models from a Hugging Face folder or from a config, and back to a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from jigsawrl.config import ARCHITECTURES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(path: str, *, dtype: torch.dtype) -> Any:
    """The causal language model in a local folder.

    Raises ValueError, in one line, where the folder is missing or corrupt, or the architecture is
    neither Qwen3 nor Llama."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    folder = Path(path)
    check_architecture(_read_config(folder), folder)
    try:
        model, problems = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(
            f"model.path: the weights in {folder} can't be loaded: {str(error).splitlines()[0]}"
        ) from error
    if problems["missing_keys"]:
        missing = ", ".join(sorted(problems["missing_keys"])[:3])
        raise ValueError(f"model.path: the weights in {folder} lack {missing}")
    return model


def model_from_config(model_config: str, *, dtype: torch.dtype) -> Any:
    """A model of the shape that a ``config.json`` text describes; its weights are arbitrary."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(model_config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def check_architecture(model_config: dict[str, Any], folder: Path) -> None:
    """Raise ValueError unless the model is one that the engine runs."""
    kind = model_config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ValueError(
            f"model.path: {folder} holds a {kind!r} model; supported are {', '.join(ARCHITECTURES)}"
        )


def export_checkpoint(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write a Hugging Face checkpoint: config, safetensors, tokenizer, greedy generation config."""
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.generation_config.pad_token_id = model.config.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except OSError as error:
        raise ValueError(
            f"model.path: no checkpoint in {folder} (config.json: {error.strerror});"
            " give the folder that save_pretrained wrote"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"model.path: {folder}/config.json is corrupt: {error}") from error
    assert isinstance(config, dict)
    return config
