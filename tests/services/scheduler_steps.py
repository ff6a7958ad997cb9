"""What the tests of the scheduler service do to it: submit, ask, start processes, wait."""

import asyncio
import contextlib
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from jigsawrl.bus.client import NatsBus
from jigsawrl.config import (
    EvaluationConfig,
    InitModelConfig,
    PipelineConfig,
    SortDigitsConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.events import NodeStarted
from jigsawrl.contract.message import Worker
from jigsawrl.contract.requests import Status, StatusQuery, Submit
from jigsawrl.contract.spec import Device

NODE = Worker(id="node", boot="n1")

Start = Callable[[], AbstractAsyncContextManager["asyncio.Future[None]"]]


def config(name: str = "p") -> PipelineConfig:
    return PipelineConfig(
        name=name,
        model=InitModelConfig(max_position_embeddings=64),
        task=SortDigitsConfig(),
        trainer=TrainerConfig(num_steps=2, groups_per_batch=2),
        evaluation=EvaluationConfig(enabled=False),
    )


async def submit(bus: NatsBus, wanted: PipelineConfig, *, request: str = "r1") -> str | None:
    message = Submit(id=request, config=encode_config(wanted))
    return (await bus.request("scheduler", message, timeout_s=10)).error


async def status(bus: NatsBus) -> Status:
    return await bus.request("scheduler", StatusQuery(id=uuid.uuid4().hex), timeout_s=10)


@asynccontextmanager
async def collecting(bus: NatsBus, worker: Worker) -> AsyncIterator[list[Any]]:
    """Commands of one boot, as they come."""
    commands: list[Any] = []

    async def handle(command: Any) -> None:
        commands.append(command)

    await bus.bind_commands(worker)
    task = asyncio.ensure_future(bus.consume_commands(worker, handle))
    yield commands
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def until(condition: Callable[[], Any]) -> None:
    async def holds() -> bool:
        return bool(condition())

    await until_true(holds)


async def until_true(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.02)


async def start_node(bus: NatsBus) -> None:
    devices = (Device("node", 0, "cpu", 1 << 33),)
    await bus.publish_event(NodeStarted(id="node", node=NODE, devices=devices))


async def until_leads(bus: NatsBus, *, after: int) -> None:
    async def leads() -> bool:
        return (await status(bus)).leader_epoch > after

    await until_true(leads)


@asynccontextmanager
async def process(url: str, prefix: str, folder: Path) -> AsyncIterator[Process]:
    """A scheduler as users start it."""
    arguments = ("--url", url, "--state-dir", str(folder), "--prefix", prefix)
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.scheduler", *arguments
    )
    try:
        yield running
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
