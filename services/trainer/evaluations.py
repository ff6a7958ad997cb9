"""What the scheduler knows of a pipeline's evaluations, for trackers: results never pass a trainer.

Asked for, as people ask: a look that fails is made up for by the next, and the last one is at the end.
"""

from __future__ import annotations

import asyncio

from jigsawrl.bus.base import BusError
from jigsawrl.contract.requests import Status, StatusQuery
from services.run import Context
from services.trainer.tracking.tracking import Tracking

PERIOD_S = 5.0
"""Between two looks: nobody watches a tracker more closely, and each costs the scheduler an answer."""

LOOK_TIMEOUT_S = 1.0
"""At the end the scheduler may be gone already."""


class Evaluations:
    """Of one pipeline."""

    def __init__(self, context: Context, tracking: Tracking) -> None:
        self._context = context
        self._tracking = tracking

    async def follow(self) -> None:
        """Until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(PERIOD_S)

    async def look(self) -> None:
        """Once."""
        query = StatusQuery(id=self._context.new_id(StatusQuery.tag()))
        try:
            status: Status = await self._context.bus.request(
                "status", query, timeout_s=LOOK_TIMEOUT_S
            )
        except BusError:
            return
        for pipeline in status.pipelines:
            if pipeline.pipeline == self._context.pipeline:
                self._tracking.add_evaluations(pipeline.evaluations)
