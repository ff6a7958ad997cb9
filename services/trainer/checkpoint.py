"""Checkpoints on disk: ``<run>/checkpoints/v<version>-e<gang_epoch>/``, real once ``COMMITTED`` exists.

The learner and `export` are the callers; no torch model is known here, only named tensors. All tensors
are whole (not sharded), so that any number of ranks can resume. Files are safetensors and JSON: nothing
here can run code when it is read. The marker is created exclusively, after everything else is on disk,
and lists the sha256 of each file: what is not as it was written is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec
import structlog
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jigsawrl.contract.message import Ledger

log = structlog.get_logger()

FOLDER = "checkpoints"
MARKER = "COMMITTED"
STATE_FILE = "state.json"
TOKENIZER_FOLDER = "tokenizer"
_NAME = re.compile(r"v(\d+)-e(\d+)")


class StepTotals(msgspec.Struct, frozen=True, kw_only=True):
    """What is told of a step: kept, so that one that was committed and not yet announced can be."""

    num_trained_tokens: int = 0
    metrics: dict[str, float] = {}
    """Those that are finite: JSON has no others."""

    @classmethod
    def of(cls, metrics: dict[str, float]) -> StepTotals:
        """From all of a step's metrics."""
        return cls(
            num_trained_tokens=int(metrics["generated_tokens"]),
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
        )


class CheckpointState(msgspec.Struct, frozen=True, kw_only=True):
    """All of a checkpoint that is no tensor."""

    pipeline: str
    version: int
    gang_epoch: int
    ledger: Ledger
    """Which training prompts and groups led to this version."""
    totals: StepTotals = StepTotals()
    """Of the step that led to this version; empty at version 0."""
    dtype: Literal["float32", "bfloat16"]
    """What the model computes in and is exported as; the stored weights are float32."""
    model_config: str
    """The Hugging Face ``config.json``."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One committed checkpoint, read."""

    path: Path
    state: CheckpointState
    tensors: dict[str, dict[str, Tensor]]
    """``model``, ``optimizer``, ``rng``; ``reference`` where KL is on, ``critic`` and
    ``critic_optimizer`` with PPO. File name to its tensors."""


class _Marker(msgspec.Struct, frozen=True, kw_only=True):
    sha256: dict[str, str]
    """Relative path to digest."""


def write_files(
    run_folder: Path,
    *,
    state: CheckpointState,
    tensors: dict[str, dict[str, Tensor]],
    tokenizer: Any,
) -> Path:
    """Everything but the marker, flushed to disk; replaces what an interrupted attempt left."""
    folder = path_of(run_folder, version=state.version, gang_epoch=state.gang_epoch)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name, named in tensors.items():
        save_file({key: tensor.contiguous() for key, tensor in named.items()}, _file(folder, name))
    (folder / STATE_FILE).write_bytes(msgspec.json.encode(state))
    tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
    for path in _files(folder):
        _flush(path)
    for path in (folder / TOKENIZER_FOLDER, folder):
        _flush(path)
    return folder


def commit(folder: Path) -> None:
    """Create the marker; raises FileExistsError where another did."""
    marker = _Marker(
        sha256={str(path.relative_to(folder)): _sha256(path) for path in _files(folder)}
    )
    descriptor = os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(marker))
        file.flush()
        os.fsync(file.fileno())
    _flush(folder)
    _flush(folder.parent)


def path_of(run_folder: Path, *, version: int, gang_epoch: int) -> Path:
    """Where a checkpoint lies."""
    return run_folder / FOLDER / f"v{version}-e{gang_epoch}"


def is_committed(folder: Path) -> bool:
    """Whether the marker exists."""
    return (folder / MARKER).exists()


def committed(run_folder: Path) -> list[Path]:
    """Committed checkpoints, best first: by gang epoch, then version. A gang that was replaced may
    have gone on for a while; what it wrote after its successor's start must not win."""
    found = []
    for folder in (run_folder / FOLDER).glob("v*-e*"):
        match = _NAME.fullmatch(folder.name)
        if match and is_committed(folder):
            found.append(((int(match[2]), int(match[1])), folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def is_replaced(run_folder: Path, *, gang_epoch: int) -> bool:
    """Whether a later gang has begun to write: the run folder is that one's from then on."""
    folders = (run_folder / FOLDER).glob("v*-e*")
    return any(_epoch_of(folder) > gang_epoch for folder in folders)


def latest(run_folder: Path) -> Checkpoint | None:
    """The best checkpoint that is whole; None where none was ever committed.

    Raises ValueError where all of them are corrupt."""
    passed: list[Path] = []
    # Looked for anew each time: a replaced gang that still runs may have put a newer one in the place
    # of the one that was read.
    while folders := [folder for folder in committed(run_folder) if folder not in passed]:
        try:
            return read(folders[0])
        except ValueError as error:
            log.warning("corrupt checkpoint passed over", reason=str(error))
            passed.append(folders[0])
    if passed:
        raise ValueError(
            f"all checkpoints in {run_folder / FOLDER} are corrupt ({len(passed)}, newest"
            f" {passed[0].name}); restore one from a backup, or start a new run"
        )
    return None


def read(folder: Path) -> Checkpoint:
    """One committed checkpoint; raises ValueError, in one line, where it is not as it was written."""
    try:
        marker = msgspec.json.decode((folder / MARKER).read_bytes(), type=_Marker)
        for name, digest in marker.sha256.items():
            if _sha256(folder / name) != digest:
                raise ValueError(f"checkpoint {folder}: {name} is corrupt")
        state = msgspec.json.decode((folder / STATE_FILE).read_bytes(), type=CheckpointState)
        tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    except OSError as error:
        raise ValueError(f"checkpoint {folder}: {error.filename}: {error.strerror}") from error
    except (msgspec.DecodeError, SafetensorError) as error:
        raise ValueError(f"checkpoint {folder} is corrupt: {error}") from error
    return Checkpoint(path=folder, state=state, tensors=tensors)


def prune(run_folder: Path, *, keep_last: int, gang_epoch: int) -> None:
    """Remove all but the best `keep_last` committed checkpoints, and attempts without a marker; never
    what a later gang writes, which this one does not know that it was replaced by.

    The marker goes first, so that a half-removed checkpoint is none."""
    own = [folder for folder in committed(run_folder) if _epoch_of(folder) <= gang_epoch]
    for folder in (run_folder / FOLDER).glob("v*-e*"):
        if folder in own[:keep_last] or _epoch_of(folder) > gang_epoch:
            continue
        # A replaced gang may be removing the same one; what that leaves, the next call removes.
        with contextlib.suppress(FileNotFoundError):
            (folder / MARKER).unlink(missing_ok=True)
            shutil.rmtree(folder)


def _epoch_of(folder: Path) -> int:
    match = _NAME.fullmatch(folder.name)
    return int(match[2]) if match else 0


def _file(folder: Path, name: str) -> Path:
    return folder / f"{name}.safetensors"


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARKER)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
