"""``python -m services.trainer.export RUN --to DIR [--version N]``: a run's model as a Hugging Face
checkpoint. Reads committed checkpoints only; needs no running system."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from services.trainer import checkpoint


def export(run_folder: Path, *, to: Path, version: int | None) -> int:
    """Write the checkpoint of `version` (or the best one) to a new folder; the version written.

    Raises ValueError or OSError, in one line."""
    if not run_folder.is_dir():
        raise ValueError(f"{run_folder}: no such run folder")
    if to.exists():
        raise ValueError(f"{to} exists; choose a folder that does not")
    if not checkpoint.committed(run_folder):
        raise ValueError(
            f"no committed checkpoint in {run_folder / checkpoint.FOLDER}; give the folder of a run"
            " that got as far as version 0"
        )
    # After what can be refused at once: these take seconds to import.
    from transformers import AutoTokenizer

    from jigsawrl.models.loading import DTYPES, export_checkpoint, model_from_config
    from services.trainer.parallel import load_full_state

    saved = _find(run_folder, version)
    model = model_from_config(saved.state.model_config, dtype=DTYPES["float32"])
    load_full_state(model, saved.tensors["model"])
    tokenizer = AutoTokenizer.from_pretrained(
        saved.path / checkpoint.TOKENIZER_FOLDER, local_files_only=True
    )
    export_checkpoint(to, model.to(DTYPES[saved.state.dtype]), tokenizer)
    return saved.state.version


def _find(run_folder: Path, version: int | None) -> checkpoint.Checkpoint:
    if version is None:
        saved = checkpoint.latest(run_folder)
        assert saved is not None
        return saved
    folders = checkpoint.committed(run_folder)
    for folder in folders:
        if folder.name.startswith(f"v{version}-"):
            return checkpoint.read(folder)
    there = ", ".join(folder.name for folder in folders) or "none"
    raise ValueError(
        f"no committed checkpoint of version {version} in {run_folder}; there: {there}"
    )


def main() -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer.export")
    parser.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="must not exist")
    parser.add_argument("--version", type=int, help="default: the newest committed")
    arguments = parser.parse_args()
    try:
        version = export(arguments.run, to=arguments.to, version=arguments.version)
    except (ValueError, OSError) as error:
        print(f"jigsaw export: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"wrote version {version} to {arguments.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
