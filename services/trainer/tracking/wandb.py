"""A Weights & Biases run in ``wandb/`` of the pipeline's folder, offline: nothing is sent, no account
is asked for. ``wandb sync`` uploads it, during the run or later, as often as one likes.

Each process writes the run anew, with all points that stand and under the same id, and deletes older
copies: so an upload has no version twice, whatever was trained again. The x-axis is a column,
``version``, not W&B's own count of rows, which can't go back to a version that is evaluated late.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jigsawrl.config_tracking import WandbConfig
from services.trainer.tracking.base import Point

FOLDER = "wandb"
ID_FILE = "id"
"""In that folder: what the server will know the run by."""

SETTINGS = {
    "console": "off",
    "silent": True,
    "save_code": False,
    "disable_git": True,
    "disable_job_creation": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
"""Metrics and configuration only: no output, no code, no samples of the machine."""


class Wandb:
    """Of one pipeline."""

    name = "wandb"

    def __init__(self, run_folder: Path, wanted: WandbConfig, *, config: dict[str, Any]) -> None:
        self._run_folder = run_folder
        self._wanted = wanted
        self._config = config
        self._run: Any = None

    def begin(self, points: Sequence[Point]) -> None:
        """See `Tracker.begin`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would use the network
        import wandb  # here, on the tracker's thread: it takes seconds

        folder = self._run_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("offline-run-*"):
            shutil.rmtree(path)
        self._run = wandb.init(
            mode="offline",
            dir=str(self._run_folder),
            id=_id(folder / ID_FILE),
            name=self._config["name"],
            project=self._wanted.project,
            entity=self._wanted.entity,
            config=self._config,
            settings=wandb.Settings(**SETTINGS),
        )
        self._run.define_metric("version", hidden=True)
        self._run.define_metric("*", step_metric="version")
        for point in points:
            self.add(point)

    def add(self, point: Point) -> None:
        """See `Tracker.add`."""
        self._run.log({"version": point.version, **point.values})

    def close(self) -> None:
        """See `Tracker.close`. A run that is finished may not be on disk yet: the process that writes
        it is waited for, too."""
        if self._run is not None:
            import wandb

            self._run.finish()
            wandb.teardown()


def _id(path: Path) -> str:
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:12])
    return path.read_text().strip()
