"""Makes the folder of one run: a new one each time, never an old one."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError


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
