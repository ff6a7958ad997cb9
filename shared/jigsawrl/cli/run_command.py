"""`jigsaw run`: the embedded system, pipelines submitted to it, and how they ended.

Called by `main`. The last line on standard output is the summary's JSON object.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import connect
from jigsawrl.cli.disk import watch_disk
from jigsawrl.cli.embedded import Devices, device_kind, embedded_system, has_cuda_device
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.metrics_addresses import MetricsAddresses
from jigsawrl.cli.pipeline_client import PipelineClient, View
from jigsawrl.cli.run_folder import (
    PROFILE_FILE,
    Run,
    lock,
    make_run_folder,
    read_run,
    write_run,
)
from jigsawrl.cli.summary import describe, succeeded, summarize, to_line
from jigsawrl.cli.supervisor import GaveUpError
from jigsawrl.cli.views import build_view
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.contract.requests import PipelineStatus, Status
from jigsawrl.profile_file import read_profile


def run(
    configs: Sequence[PipelineConfig],
    *,
    policy: str,
    start_together: bool,
    profile: DeviceProfile | None = None,
    runs_folder: Path,
    name: str | None,
    metrics: MetricsAddresses | None,
) -> int:
    """Run pipelines to their ends; the exit status."""
    names = [config.name for config in configs]
    twice = next((one for one in names if names.count(one) > 1), None)
    if twice is not None:
        raise CommandError(
            f"two pipelines are called {twice}: give one of them another name",
            status=EXIT_BAD_INPUT,
        )
    view = build_view()
    try:
        folder = make_run_folder(runs_folder, pipeline="+".join(names), name=name)
        run = write_run(
            folder, configs, policy=policy, start_together=start_together, profile=profile
        )
        return _run_in(folder, configs, view, run=run, metrics=metrics)
    finally:
        view.close()


def resume(folder: Path, *, metrics: MetricsAddresses | None) -> int:
    """Go on with a run from what its folder holds; the exit status."""
    run, configs = read_run(folder)
    _check_profile(folder / PROFILE_FILE, configs)
    view = build_view()
    try:
        return _run_in(folder.resolve(), configs, view, run=run, metrics=metrics)
    finally:
        view.close()


def _check_profile(path: Path, configs: Sequence[PipelineConfig]) -> None:
    """The run may go on with another machine's devices than it was started with."""
    if not path.exists():
        return
    try:
        read_profile(path, device_kind=device_kind(configs))
    except ValueError as error:
        raise CommandError(
            f"{error} (the run goes on with the profile that stands there)", status=EXIT_BAD_INPUT
        ) from None


def _run_in(
    folder: Path,
    configs: Sequence[PipelineConfig],
    view: View,
    *,
    run: Run,
    metrics: MetricsAddresses | None,
) -> int:
    if any(config.device == "cuda" for config in configs) and not has_cuda_device():
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
        watched = WatchedRun(configs, folder, view, run=run, metrics=metrics)
        exit_status = asyncio.run(_until_signal(watched))
    finally:
        view.close()
        os.close(held)
    _conclude(watched)
    return exit_status


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
    """One run, and how it ended."""

    def __init__(
        self,
        configs: Sequence[PipelineConfig],
        folder: Path,
        view: View,
        *,
        run: Run,
        metrics: MetricsAddresses | None = None,
    ) -> None:
        self.folder = folder
        self.problem: str | None = None
        """Why it did not end well: one line."""
        self.log_tail: tuple[str, ...] = ()
        self._configs = configs
        self._run = run
        self._metrics = metrics
        self._view = view
        self._client: PipelineClient | None = None
        self._run_id = f"{folder.name}-{uuid.uuid4().hex[:8]}"

    @property
    def varies(self) -> bool:
        """Whether another batching of the same sequences could have given other bits."""
        return any(_varies(config) for config in self._configs)

    @property
    def status(self) -> Status | None:
        """The last that was heard of the pipelines."""
        return None if self._client is None else self._client.status

    async def run(self) -> int:
        """Start everything, submit, watch to the end, stop everything; the exit status."""
        devices: Devices = "cpu" if all(c.device == "cpu" for c in self._configs) else "auto"
        async with embedded_system(
            self.folder,
            runs_folder=self.folder,
            policy=self._run.policy,
            devices=devices,
            metrics=self._metrics,
        ) as system:
            self._view.on_notice(f"bus: {system.url}")
            if self._metrics is not None:
                self._view.on_notice(self._metrics.told())
            supervising = asyncio.create_task(system.supervise(self._view.on_notice))
            driving = asyncio.create_task(self._drive(system.url))
            disk = asyncio.create_task(
                watch_disk(self.folder, self._view.on_notice, on_room=system.restart_store)
            )
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
                disk.cancel()
                await asyncio.gather(supervising, driving, disk, return_exceptions=True)
        return EXIT_FAILED

    async def _drive(self, url: str) -> int:
        bus = await connect(url, name="jigsaw-run")
        try:
            self._client = PipelineClient(
                bus,
                self._configs,
                self._view,
                run_id=self._run_id,
                start_together=self._run.start_together,
            )
            ended = await self._client.run()
        finally:
            await bus.close()
        problems = {p.pipeline: _problem(p) for p in ended if not succeeded(p)}
        if not problems:
            return 0
        named = [f"{name}: {reason}" for name, reason in problems.items()]
        self.problem = "; ".join(named if len(ended) > 1 else problems.values())
        return EXIT_FAILED


def _varies(config: PipelineConfig) -> bool:
    deterministic = config.rollout.engine.deterministic
    on_gpu = config.device != "cpu" and has_cuda_device()
    return deterministic is False or (deterministic == "auto" and on_gpu)


def _problem(pipeline: PipelineStatus) -> str:
    return pipeline.failure or "not every admitted group has exactly one fate"


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
