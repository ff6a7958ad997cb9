"""`jigsaw run`: the embedded system, one pipeline submitted to it, and how it ended.

Called by `main`. The last line on standard output is the summary's JSON object.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from pathlib import Path

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import connect
from jigsawrl.cli.config_file import to_json
from jigsawrl.cli.embedded import embedded_system, has_cuda_device
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.pipeline_client import PipelineClient, View
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.cli.run_folder import CONFIG_FILE, lock, make_run_folder, read_config
from jigsawrl.cli.summary import describe, succeeded, summarize, to_line
from jigsawrl.cli.supervisor import GaveUpError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.requests import Status


def run(config: PipelineConfig, *, runs_folder: Path, name: str | None) -> int:
    """Run one pipeline to its end; the exit status."""
    view = _build_view()
    try:
        folder = make_run_folder(runs_folder, pipeline=config.name, name=name)
        try:
            (folder / CONFIG_FILE).write_text(to_json(config) + "\n")
            (folder / "logs").mkdir()
        except OSError as error:
            raise CommandError(
                f"can't write into {folder}: {error.strerror}; free some space or choose another"
                " --runs-folder",
                status=EXIT_BAD_INPUT,
            ) from None
        return _run_in(folder, config, view)
    finally:
        view.close()


def resume(folder: Path) -> int:
    """Go on with a run from what its folder holds; the exit status."""
    config = read_config(folder)
    view = _build_view()
    try:
        return _run_in(folder.resolve(), config, view)
    finally:
        view.close()


def _run_in(folder: Path, config: PipelineConfig, view: View) -> int:
    if config.device == "cuda" and not has_cuda_device():
        raise CommandError(
            'device "cuda": this machine has no CUDA device; set device to "cpu" or "auto"',
            status=EXIT_BAD_INPUT,
        )
    held = lock(folder)
    try:
        logging.basicConfig(
            filename=folder / "logs" / "jigsaw.log",
            format="%(asctime)s %(levelname)s %(name)s %(message)s",
        )
        view.on_notice(f"run folder: {folder}")
        watched = WatchedRun(config, folder, view)
        exit_status = asyncio.run(_until_signal(watched))
    finally:
        view.close()
        os.close(held)
    _conclude(watched)
    return exit_status


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
        if len(received) == 1:  # a second Ctrl-C must not break off the stop
            running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)
    try:
        return await running
    except asyncio.CancelledError:
        if not received:
            raise
        name = signal.Signals(received[0]).name
        watched.problem = f"stopped by {name}; go on with: jigsaw run --resume {watched.folder}"
        return 128 + received[0]


class WatchedRun:
    """One run of one pipeline, and how it ended."""

    def __init__(self, config: PipelineConfig, folder: Path, view: View) -> None:
        self.folder = folder
        self.problem: str | None = None
        """Why it did not end well: one line."""
        self.log_tail: tuple[str, ...] = ()
        self._config = config
        self._view = view
        self._client: PipelineClient | None = None
        self._run_id = f"{folder.name}-{uuid.uuid4().hex[:8]}"

    @property
    def varies(self) -> bool:
        """Whether another batching of the same sequences could have given other bits."""
        return self._config.rollout.engine.deterministic is False or (
            self._config.rollout.engine.deterministic == "auto"
            and self._config.device != "cpu"
            and has_cuda_device()
        )

    @property
    def status(self) -> Status | None:
        """The last that was heard of the pipeline."""
        return None if self._client is None else self._client.status

    async def run(self) -> int:
        """Start everything, submit, watch to the end, stop everything; the exit status."""
        async with embedded_system(self.folder) as system:
            self._view.on_notice(f"bus: {system.url}")
            supervising = asyncio.create_task(system.supervise(self._view.on_notice))
            driving = asyncio.create_task(self._drive(system.url))
            try:
                await asyncio.wait({supervising, driving}, return_when=asyncio.FIRST_COMPLETED)
                if driving.done():
                    return driving.result()
                await supervising
            except GaveUpError as error:
                self.problem, self.log_tail = str(error), error.tail
            except BusError as error:
                self.problem = str(error)
            except CommandError as error:
                self.problem = str(error)
                return error.status
            except asyncio.CancelledError:
                self._view.on_notice("stopping")
                raise
            finally:
                # Before the processes are stopped, or their ends would look like crashes.
                supervising.cancel()
                driving.cancel()
                await asyncio.gather(supervising, driving, return_exceptions=True)
        return EXIT_FAILED

    async def _drive(self, url: str) -> int:
        bus = await connect(url, name="jigsaw-run")
        try:
            self._client = PipelineClient(bus, self._config, self._view, run_id=self._run_id)
            pipeline = await self._client.run()
        finally:
            await bus.close()
        if succeeded(pipeline):
            return 0
        self.problem = pipeline.failure or "not every admitted group has exactly one fate"
        return EXIT_FAILED


def _conclude(watched: WatchedRun) -> None:
    """The summary for people, the file, the reason of a failure, and the last line."""
    status = watched.status
    if status is not None:
        for line in describe(status, run_folder=watched.folder):
            print(line)
    if status is not None and watched.varies:
        print("  results may vary with the batch: rollout.engine.deterministic is off")
    if watched.problem is not None:
        for line in watched.log_tail:
            print(f"  | {line}", file=sys.stderr)
        print(f"jigsaw run: {watched.problem}", file=sys.stderr, flush=True)
    line = to_line(summarize(status, run_folder=watched.folder))
    try:
        (watched.folder / "summary.json").write_text(line + "\n")
    except OSError as error:
        print(f"jigsaw run: no summary.json: {error.strerror}", file=sys.stderr)
    print(line, flush=True)
