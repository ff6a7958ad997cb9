"""Rollout and evaluation get weights from the channel alone: neither needs the run's folder."""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from jigsawrl.bus.client import connect
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.pipeline_client import PipelineClient
from jigsawrl.cli.plain_view import PlainView
from jigsawrl.contract.requests import Status
from tests.integration.live_run import NUM_HELD_OUT, NUM_STEPS, PIPELINE

pytestmark = pytest.mark.slow


def can_unshare() -> bool:
    """Whether this machine lets us have a mount namespace of our own."""
    try:
        return subprocess.run(["unshare", "-m", "true"], check=False).returncode == 0
    except OSError:
        return False


@asynccontextmanager
async def programs(
    url: str, logs: Path
) -> AsyncIterator[Callable[..., Awaitable[asyncio.subprocess.Process]]]:
    """``await start(module, *arguments, hidden=FOLDER)``; all are stopped at the end, in time. With
    `by` it takes another way to the server than theirs; with `library` it runs another version."""
    started: list[asyncio.subprocess.Process] = []

    async def start(
        module: str,
        *arguments: str,
        hidden: Path | None = None,
        by: str = url,
        library: Path | None = None,
    ) -> asyncio.subprocess.Process:
        command = [sys.executable, "-m", module, "--url", by, *arguments]
        if hidden is not None:
            hide = f"mount -t tmpfs -o mode=000 none {shlex.quote(str(hidden))}"
            command = ["unshare", "-m", "sh", "-c", f"{hide} && exec {shlex.join(command)}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if library is not None:
            paths = [str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment["PYTHONPATH"] = os.pathsep.join(paths)
        with (logs / f"{module}-{len(started)}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=environment
            )
        started.append(process)
        return process

    try:
        yield start
    finally:
        for process in reversed(started):
            if process.returncode is None:
                process.terminate()
        async with asyncio.timeout(15):
            await asyncio.gather(*(process.wait() for process in started))


async def until(
    client: PipelineClient, condition: Callable[[Status], bool], *, timeout_s: float = 60
) -> None:
    """Wait for something to be true of the status."""
    async with asyncio.timeout(timeout_s):
        while client.status is None or not condition(client.status):
            await asyncio.sleep(0.1)


@pytest.mark.skipif(not can_unshare(), reason="needs a mount namespace (root)")
async def test_rollout_and_evaluation_work_where_the_run_folder_is_hidden(
    own_server: EmbeddedServer, tmp_path: Path
) -> None:
    run_folder, logs = tmp_path / "run", tmp_path / "logs"
    run_folder.mkdir()
    logs.mkdir()
    (tmp_path / "pipeline.toml").write_text(PIPELINE)
    config = load_config(tmp_path / "pipeline.toml")
    bus = await connect(own_server.url, name="test")
    async with AsyncExitStack() as last, programs(own_server.url, logs) as start:
        last.push_async_callback(bus.close)
        await start("services.scheduler", "--state-dir", str(tmp_path / "scheduler"))
        client = PipelineClient(bus, [config], PlainView(lambda line: None), run_id="run")
        running = asyncio.create_task(client.run())
        # No node yet, so the pipeline waits; whoever joins now stands in for a tenant of its role.
        await until(client, lambda status: bool(status.pipelines))
        for role in ("rollout", "evaluation"):
            arguments = ["--pipeline", "tiny", "--worker", f"tiny.{role}9", "--role", role]
            await start("services.rollout", *arguments, hidden=run_folder)
        await until(client, lambda status: len(status.pipelines[0].workers) == 2)
        state = ["--state-dir", str(tmp_path / "node"), "--runs-folder", str(run_folder)]
        await start("services.node", *state)
        async with asyncio.timeout(120):
            [pipeline] = await running
        assert pipeline.state == "finished", pipeline.failure
        assert pipeline.version == NUM_STEPS
        evaluated = [one.version for one in pipeline.evaluations]
        assert (evaluated[0], evaluated[-1]) == (0, NUM_STEPS)
        assert len(evaluated) + pipeline.num_evaluations_skipped == NUM_STEPS + 1
        assert all(one.num_problems == NUM_HELD_OUT for one in pipeline.evaluations)
        tenants = {path.stem for path in (tmp_path / "node" / "logs").glob("*.log")}
        assert tenants == {"tiny.trainer0", "tiny.environment0", "tiny.reward0"}
