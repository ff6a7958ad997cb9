"""The trackers of a trainer, or none: what `Trainer` calls at each stage of its life."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path

from jigsawrl.config import PipelineConfig
from services.run import Context
from services.trainer.evaluations import Evaluations
from services.trainer.tracking import build_tracking
from services.trainer.tracking.tracking import Tracking

CLOSE_TIMEOUT_S = 3.4
"""All parts of a stop; nested in the 3.8 s that a tenant is given to end."""


class Tracked:
    """Of one boot of rank 0."""

    def __init__(self) -> None:
        self.tracking: Tracking | None = None
        """None where the pipeline asks for none."""
        self._evaluations: Evaluations | None = None

    def configure(self, config: PipelineConfig, context: Context, run_folder: Path) -> None:
        """Raises ValueError where a tracker can't be had on this machine."""
        self.tracking = build_tracking(config, run_folder)
        if self.tracking is not None and config.evaluation.enabled:
            self._evaluations = Evaluations(context, self.tracking)

    async def run(self) -> None:
        """Beside the trainer's work, until cancelled."""
        if self._evaluations is not None:
            await self._evaluations.follow()

    async def close(self, *, after: Awaitable[None]) -> None:
        """Once the trainer's own end has come. A pipeline ends with its last evaluation, which is not
        told yet: it is asked for meanwhile."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + CLOSE_TIMEOUT_S
        look = asyncio.sleep(0) if self._evaluations is None else self._evaluations.look()
        await asyncio.gather(after, look)
        if self.tracking is not None:
            await self.tracking.close(timeout_s=max(0.0, end_s - loop.time()))
