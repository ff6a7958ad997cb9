"""Submits one pipeline to the scheduler and watches it to its end.

Called by `run_command`. It asks and shows; every decision is the scheduler's, and a scheduler that is
away for a while is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Protocol

from jigsawrl.bus.base import Bus, BusError
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.config import PipelineConfig, encode_config
from jigsawrl.contract.message import message_id
from jigsawrl.contract.requests import (
    Activity,
    PipelineStatus,
    Status,
    StatusQuery,
    Submit,
    Submitted,
)

POLL_INTERVAL_S = 0.5

STATUS_TIMEOUT_S = 3.0
"""A scheduler that is silent for so long is reported; a restart takes about as long."""

SUBMIT_TIMEOUT_S = 60.0
"""The scheduler's first start included, on a busy machine."""


class View(Protocol):
    """What shows a run."""

    def on_status(self, status: Status, *, now_s: float) -> None:
        """The state of all pipelines."""

    def on_activity(self, activity: Activity, *, now_s: float) -> None:
        """What a worker does now."""

    def on_notice(self, text: str) -> None:
        """One line for people."""

    def close(self) -> None:
        """Give the terminal back."""


class PipelineClient:
    """One pipeline as its submitter sees it."""

    def __init__(self, bus: Bus, config: PipelineConfig, view: View, *, run_id: str) -> None:
        self.status: Status | None = None
        """The last that was heard."""
        self._bus = bus
        self._config = config
        self._view = view
        self._run_id = run_id
        self._numbers = itertools.count()

    async def run(self) -> PipelineStatus:
        """Submit, unless the run's store has the pipeline already, and watch; the state in which it
        ended. Raises `CommandError` where refused."""
        watching = asyncio.create_task(self._watch_activities())
        try:
            known = await self._ask(timeout_s=SUBMIT_TIMEOUT_S)
            if known is None or known.state == "failed":
                # One that failed starts again from its checkpoints, with nothing in flight.
                await self._submit()
            return await self._watch()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _submit(self) -> None:
        submit = Submit(
            id=message_id(Submit.tag(), self._config.name, self._run_id),
            config=encode_config(self._config),
        )
        answer: Submitted = await self._bus.request("scheduler", submit, timeout_s=SUBMIT_TIMEOUT_S)
        if answer.error is not None and await self._ask() is None:
            # Where the pipeline is there, the answer to an earlier try was lost.
            raise CommandError(answer.error, status=EXIT_BAD_INPUT)

    async def _watch(self) -> PipelineStatus:
        silent = False
        while True:
            try:
                pipeline = await self._ask()
            except BusError as error:
                if not silent:
                    self._view.on_notice(f"waiting for the scheduler: {error}")
                silent = True
            else:
                silent = False
                if pipeline is None:
                    raise CommandError(
                        f"the scheduler no longer knows pipeline {self._config.name}: its event"
                        " stream was deleted, or is another one; checkpoints are kept, resume the run",
                        status=EXIT_FAILED,
                    )
                if pipeline.state in ("finished", "failed"):
                    return pipeline
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _ask(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> PipelineStatus | None:
        query = StatusQuery(id=message_id(StatusQuery.tag(), self._run_id, next(self._numbers)))
        status: Status = await self._bus.request("scheduler", query, timeout_s=timeout_s)
        self.status = status
        self._view.on_status(status, now_s=time.monotonic())
        return next((p for p in status.pipelines if p.pipeline == self._config.name), None)

    async def _watch_activities(self) -> None:
        async for activity in self._bus.watch_activities(self._config.name):
            self._view.on_activity(activity, now_s=time.monotonic())
