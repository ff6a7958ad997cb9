"""Submits pipelines to the scheduler and watches them to their ends.

Called by `run_command`. It asks and shows; every decision is the scheduler's, and a scheduler that is
away for a while is waited for.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
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
    """Some pipelines as their submitter sees them."""

    def __init__(
        self,
        bus: Bus,
        configs: Sequence[PipelineConfig],
        view: View,
        *,
        run_id: str,
        start_together: bool = False,
    ) -> None:
        self.status: Status | None = None
        """The last that was heard."""
        self._bus = bus
        self._configs = {config.name: config for config in configs}
        self._view = view
        self._run_id = run_id
        self._companions = tuple(self._configs) if start_together else ()
        self._numbers = itertools.count()

    async def run(self) -> list[PipelineStatus]:
        """Submit in order, unless the run's store has the pipeline already, and watch. Raises
        `CommandError` where one is refused."""
        known = await self._ask(timeout_s=SUBMIT_TIMEOUT_S)
        for name, config in self._configs.items():
            if name not in known or known[name].state == "failed":
                # One that failed starts again from its checkpoints, with nothing in flight.
                await self._submit(config)
        return await self.watch()

    async def watch(self) -> list[PipelineStatus]:
        """What was submitted; the states in which they ended."""
        watching = asyncio.create_task(self._watch_activities())
        try:
            return await self._watch()
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _submit(self, config: PipelineConfig) -> None:
        submit = Submit(
            id=message_id(Submit.tag(), config.name, self._run_id),
            config=encode_config(config),
            companions=tuple(name for name in self._companions if name != config.name),
        )
        answer: Submitted = await self._bus.request("scheduler", submit, timeout_s=SUBMIT_TIMEOUT_S)
        if answer.error is not None and config.name not in await self._ask():
            # Where the pipeline is there, the answer to an earlier try was lost.
            raise CommandError(answer.error, status=EXIT_BAD_INPUT)

    async def _watch(self) -> list[PipelineStatus]:
        silent = False
        while True:
            try:
                known = await self._ask()
            except BusError as error:
                if not silent:
                    self._view.on_notice(f"waiting for the scheduler: {error}")
                silent = True
            else:
                silent = False
                gone = next((name for name in self._configs if name not in known), None)
                if gone is not None:
                    raise CommandError(
                        f"the scheduler no longer knows pipeline {gone}: its event stream was"
                        " deleted, or is another one; checkpoints are kept, resume the run",
                        status=EXIT_FAILED,
                    )
                if all(p.state in ("finished", "failed") for p in known.values()):
                    return [known[name] for name in self._configs]
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _ask(self, *, timeout_s: float = STATUS_TIMEOUT_S) -> dict[str, PipelineStatus]:
        query = StatusQuery(id=message_id(StatusQuery.tag(), self._run_id, next(self._numbers)))
        status: Status = await self._bus.request("scheduler", query, timeout_s=timeout_s)
        self.status = status
        self._view.on_status(status, now_s=time.monotonic())
        return {p.pipeline: p for p in status.pipelines if p.pipeline in self._configs}

    async def _watch_activities(self) -> None:
        async for activity in self._bus.watch_activities(None):
            self._view.on_activity(activity, now_s=time.monotonic())
