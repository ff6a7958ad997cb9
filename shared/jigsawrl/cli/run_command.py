"""`jigsaw run`: the embedded system, one pipeline submitted to it, watched to its end.

Called by `main`. It is a client: it submits, asks for the status and shows it; every decision is the
scheduler's. The last line on standard output is the summary's JSON object.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Protocol

from jigsawrl.bus.base import Bus, BusError
from jigsawrl.bus.client import connect
from jigsawrl.cli.config_file import to_json
from jigsawrl.cli.embedded import EmbeddedSystem, embedded_system
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.cli.run_folder import make_run_folder
from jigsawrl.cli.summary import describe, succeeded, summarize, to_line
from jigsawrl.cli.supervisor import GaveUpError
from jigsawrl.config import PipelineConfig, encode_config
from jigsawrl.contract.message import message_id
from jigsawrl.contract.requests import Activity, PipelineStatus, Status, StatusQuery, Submit

POLL_INTERVAL_S = 0.5

STATUS_TIMEOUT_S = 3.0
"""A scheduler that is silent for so long is reported; a restart takes about as long."""

SUBMIT_TIMEOUT_S = 60.0
"""The scheduler's first start included, on a busy machine."""


class View(Protocol):
    """What shows a run."""

    def on_status(self, status: Status, *, now_s: float) -> None: ...
    def on_activity(self, activity: Activity, *, now_s: float) -> None: ...
    def on_notice(self, text: str) -> None: ...
    def close(self) -> None: ...


def run(config: PipelineConfig, *, runs_folder: Path, name: str | None) -> int:
    """Run one pipeline to its end; the exit status."""
    view = _build_view()
    try:
        folder = make_run_folder(runs_folder, pipeline=config.name, name=name)
        (folder / "config.json").write_text(to_json(config) + "\n")
        (folder / "logs").mkdir()
        logging.basicConfig(
            filename=folder / "logs" / "jigsaw.log",
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        view.on_notice(f"run folder: {folder}")
        watched = WatchedRun(config, folder, view)
        status = asyncio.run(_until_signal(watched))
    finally:
        view.close()
    return _conclude(watched, status)


def _build_view() -> View:
    if not sys.stdout.isatty():
        return PlainView(lambda line: print(line, flush=True))
    try:
        from jigsawrl.cli.live_view import LiveView
    except ImportError:
        raise CommandError(
            "rich is missing: pip install 'jigsawrl[cli]'", status=EXIT_BAD_INPUT
        ) from None
    return LiveView()


async def _until_signal(watched: WatchedRun) -> int:
    """The run's exit status; 128 plus its number after a signal."""
    running = asyncio.ensure_future(watched.run())
    received: list[int] = []

    def on_signal(number: int) -> None:
        received.append(number)
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await running
    except asyncio.CancelledError:
        if not received:
            raise
        watched.problem = f"stopped by {signal.Signals(received[0]).name}"
        return 128 + received[0]


class WatchedRun:
    """One pipeline on its embedded system, and the last that was heard of it."""

    def __init__(self, config: PipelineConfig, folder: Path, view: View) -> None:
        self.folder = folder
        self.status: Status | None = None
        self.problem: str | None = None
        """Why it did not end well: one line."""
        self.log_tail: tuple[str, ...] = ()
        self._config = config
        self._view = view
        self._numbers = itertools.count()

    async def run(self) -> int:
        """Start everything, submit, watch to the end, stop everything; the exit status."""
        async with embedded_system(self.folder) as system:
            supervising = asyncio.create_task(system.supervise(self._view.on_notice))
            driving = asyncio.create_task(self._drive(system))
            try:
                await asyncio.wait({supervising, driving}, return_when=asyncio.FIRST_COMPLETED)
                if driving.done():
                    return driving.result()
                await supervising
            except GaveUpError as error:
                self.problem, self.log_tail = str(error), error.tail
            except BusError as error:
                self.problem = str(error)
            finally:
                # Before the processes are stopped, or their ends would look like crashes.
                supervising.cancel()
                driving.cancel()
                await asyncio.gather(supervising, driving, return_exceptions=True)
        return EXIT_FAILED

    async def _drive(self, system: EmbeddedSystem) -> int:
        bus: Bus = await connect(system.url, name="jigsaw-run")
        watching = asyncio.create_task(self._watch_activities(bus))
        try:
            await self._submit(bus)
            pipeline = await self._watch(bus)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await bus.close()
        if succeeded(pipeline):
            return 0
        self.problem = pipeline.failure or "not every admitted group has exactly one fate"
        return EXIT_FAILED

    async def _submit(self, bus: Bus) -> None:
        submit = Submit(
            id=message_id(Submit.tag(), self._config.name, self.folder.name),
            config=encode_config(self._config),
        )
        answer = await bus.request("scheduler", submit, timeout_s=SUBMIT_TIMEOUT_S)
        if answer.error is not None and await self._pipeline(bus) is None:
            # Where the pipeline is there, the answer to our first try was lost.
            raise CommandError(answer.error, status=EXIT_BAD_INPUT)

    async def _watch(self, bus: Bus) -> PipelineStatus:
        silent = False
        while True:
            try:
                pipeline = await self._pipeline(bus)
                silent = False
            except BusError as error:
                if not silent:
                    self._view.on_notice(f"waiting for the scheduler: {error}")
                silent, pipeline = True, None
            if pipeline is not None and pipeline.state in ("finished", "failed"):
                return pipeline
            await asyncio.sleep(POLL_INTERVAL_S)

    async def _pipeline(self, bus: Bus) -> PipelineStatus | None:
        query = StatusQuery(id=message_id(StatusQuery.tag(), self.folder.name, next(self._numbers)))
        status: Status = await bus.request("scheduler", query, timeout_s=STATUS_TIMEOUT_S)
        self.status = status
        self._view.on_status(status, now_s=time.monotonic())
        return next((p for p in status.pipelines if p.pipeline == self._config.name), None)

    async def _watch_activities(self, bus: Bus) -> None:
        async for activity in bus.watch_activities(self._config.name):
            self._view.on_activity(activity, now_s=time.monotonic())


def _conclude(watched: WatchedRun, exit_status: int) -> int:
    """The summary for people, the file, the reason of a failure, and the last line."""
    status = watched.status
    if status is not None:
        for line in describe(status, run_folder=watched.folder):
            print(line)
    if watched.problem is not None:
        for line in watched.log_tail:
            print(f"  | {line}", file=sys.stderr)
        print(f"jigsaw run: {watched.problem}", file=sys.stderr, flush=True)
    if status is not None:
        line = to_line(summarize(status, run_folder=watched.folder))
        with contextlib.suppress(OSError):
            (watched.folder / "summary.json").write_text(line + "\n")
        print(line, flush=True)
    return exit_status
