"""Experiment trackers: files besides ``metrics.jsonl``, for the viewers that people know.

`Tracking` is what the trainer sees. A tracker is one file with one class, imported where it is wanted;
its package is optional.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec

from jigsawrl.config import PipelineConfig
from jigsawrl.config_tracking import PACKAGES
from services.trainer.tracking.base import Tracker
from services.trainer.tracking.tracking import Tracking


def build_tracking(config: PipelineConfig, run_folder: Path) -> Tracking | None:
    """As the pipeline asks for; None where it asks for none. Raises ValueError where a package is
    missing on this machine."""
    wanted = config.tracking
    chosen = () if wanted is None else wanted.chosen()
    for name in chosen:
        if importlib.util.find_spec(PACKAGES[name]) is None:
            raise ValueError(
                f"tracking.{name}: {PACKAGES[name]} is missing on this machine: pip install"
                " 'jigsawrl[tracking]'"
            )
    trackers: list[Tracker] = []
    if "tensorboard" in chosen:
        from services.trainer.tracking.tensorboard import TensorBoard

        trackers.append(TensorBoard(run_folder))
    if wanted is not None and wanted.wandb is not None:
        from services.trainer.tracking.wandb import Wandb

        trackers.append(Wandb(run_folder, wanted.wandb, config=msgspec.to_builtins(config)))
    return Tracking(trackers) if trackers else None
