"""The folder of one run: made new, or opened again to resume; one command at a time works in it."""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from pathlib import Path

from jigsawrl.cli.config_file import from_json
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.config import PipelineConfig

CONFIG_FILE = "config.json"
LOCK_FILE = "lock"


def make_run_folder(runs_folder: Path, *, pipeline: str, name: str | None) -> Path:
    """``runs/NAME``, or ``runs/PIPELINE-TIME`` with a number where that exists; absolute.

    Raises `CommandError` where `name` exists or nothing can be written."""
    if name is not None and (Path(name).name != name or name in ("", "..")):
        raise CommandError(
            f"--name {name}: give a name, not a path; --runs-folder chooses the place",
            status=EXIT_BAD_INPUT,
        )
    stamp = time.strftime("%Y%m%d-%H%M%S")
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            suffix = "" if number == 1 else f"-{number}"
            folder = runs_folder.resolve() / (name or f"{pipeline}-{stamp}{suffix}")
            try:
                folder.mkdir()
            except FileExistsError:
                if name is not None:
                    raise CommandError(
                        f"{folder} exists: choose another --name", status=EXIT_BAD_INPUT
                    ) from None
            else:
                return folder
    except OSError as error:
        raise CommandError(
            f"can't make a run folder under {runs_folder}: {error.strerror};"
            " choose another --runs-folder",
            status=EXIT_BAD_INPUT,
        ) from None
    raise AssertionError("the count is endless")


def read_config(folder: Path) -> PipelineConfig:
    """The configuration that a run was started with; raises `CommandError` where there is none."""
    path = folder / CONFIG_FILE
    try:
        return from_json(path.read_bytes())
    except FileNotFoundError:
        raise CommandError(
            f"{folder} is no run folder: it holds no {CONFIG_FILE}", status=EXIT_BAD_INPUT
        ) from None
    except OSError as error:
        raise CommandError(
            f"{path} can't be read: {error.strerror}", status=EXIT_BAD_INPUT
        ) from None
    except ValueError as error:
        raise CommandError(
            f"{path} is not a configuration of this version of JigsawRL ({error}): resume the run"
            " with the version that started it",
            status=EXIT_BAD_INPUT,
        ) from None


def lock(folder: Path) -> int:
    """A lock that ends with this process; raises `CommandError` where another has it."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CommandError(
            f"another jigsaw run works in {folder}: stop it first", status=EXIT_BAD_INPUT
        ) from None
    return descriptor
