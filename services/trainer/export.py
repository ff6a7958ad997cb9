"""``python -m services.trainer.export RUN --to DIR [--version N]``: a committed checkpoint as a Hugging
Face checkpoint (config, safetensors, tokenizer), in the dtype that the run computed in."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from jigsawrl.models.loading import DTYPES, export_checkpoint, model_from_config
from services.trainer import checkpoint


def export(run_folder: Path, to: Path, version: int | None) -> int:
    """Write the export; the version exported. Raises ValueError, in one line."""
    from transformers import AutoTokenizer

    if not run_folder.is_dir():
        raise ValueError(f"{run_folder}: no such run folder")
    if to.exists():
        raise ValueError(f"{to} exists already; give a folder that does not")
    saved = _find(run_folder, version)
    model = model_from_config(saved.state.model_config, dtype=torch.float32)
    model.load_state_dict(saved.tensors["model"])
    tokenizer = AutoTokenizer.from_pretrained(saved.path / checkpoint.TOKENIZER_FOLDER)
    export_checkpoint(to, model.to(DTYPES[saved.state.dtype]), tokenizer)
    return saved.state.version


def _find(run_folder: Path, version: int | None) -> checkpoint.Checkpoint:
    if version is None:
        saved = checkpoint.latest(run_folder)
        if saved is None:
            raise ValueError(f"{run_folder}: holds no committed checkpoint to export")
        return saved
    folders = checkpoint.committed(run_folder)
    for folder in folders:
        if folder.name.startswith(f"v{version}-"):
            return checkpoint.read(folder)
    kept = ", ".join(sorted(folder.name for folder in folders)) or "none"
    raise ValueError(f"{run_folder}: no committed checkpoint of version {version}; kept: {kept}")


def main() -> int:
    """Exit status: 0 done, 2 nothing to export."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.export")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--to", type=Path, required=True, help="folder to write; must not exist")
    parser.add_argument("--version", type=int, help="default: the newest committed checkpoint")
    arguments = parser.parse_args()
    try:
        version = export(arguments.run, arguments.to, arguments.version)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"version {version} -> {arguments.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
