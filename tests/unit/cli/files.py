"""Pipeline files and checkpoint folders that the tests of the command write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PIPELINE = """
name = "tiny"

[model]
type = "init"

[task]
type = "sort-digits"

[trainer]
num_steps = 3
"""


def write_pipeline(folder: Path, text: str = PIPELINE) -> Path:
    """``folder/pipeline.toml``."""
    path = folder / "pipeline.toml"
    path.write_text(text)
    return path


def write_safetensors(path: Path, *, num_missing_bytes: int = 0) -> None:
    """One float32 tensor of 4 entries, cut short where asked."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16 - num_missing_bytes))


def write_checkpoint(folder: Path, *, unknown: str = "c", **config: Any) -> Path:
    """A folder with all that `jigsaw check` looks at: config, tokenizer of 5 ids, weights. Whatever the
    tokenizer does not know is the token `unknown`; refused where that is no token."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"model_type": "qwen3", "vocab_size": 5, "max_position_embeddings": 128} | config
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(unknown)))
    write_safetensors(folder / "model.safetensors")
    return folder


def _tokenizer(unknown: str) -> dict[str, Any]:
    eos = {"id": 4, "content": "<eos>", "special": True, "normalized": False}
    eos |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    each = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": [eos],
        "pre_tokenizer": each,
        "model": {
            "type": "WordLevel",
            "vocab": {"a": 0, "b": 1, "c": 2, "d": 3},
            "unk_token": unknown,
        },
    }
