"""Messages for the bus tests, and what they read from the bus."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from jigsawrl.bus.base import StoredEvent
from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.commands import Drop
from jigsawrl.contract.events import PipelineCancelled
from jigsawrl.contract.message import Array, Ref, Worker
from jigsawrl.contract.records import DeadLetter, GroupRecord, RewardRecord, WeightManifest

T = TypeVar("T")

WORKER = Worker(id="p.rollout0", boot="b1")


def an_event(number: int, *, reason: str = "") -> PipelineCancelled:
    """The event number `number`."""
    return PipelineCancelled(id=f"e:{number}", pipeline="p", reason=reason or str(number))


def a_command(number: int, *, worker: Worker = WORKER) -> Drop:
    """The command number `number`."""
    return Drop(id=f"c:{number}", worker=worker, leader_epoch=1, sequences=((str(number), 1),))


def a_record(number: int, *, text: str = "") -> RewardRecord:
    """The record number `number`."""
    return RewardRecord(
        id=f"r:{number}",
        pipeline="p",
        sequence=str(number),
        epoch=1,
        reward=1.0,
        correct=True,
        response_text=text,
    )


def a_group() -> GroupRecord:
    """One prompt."""
    return GroupRecord(
        id="g:1",
        pipeline="p",
        group="p/g0",
        epoch=0,
        cursor=0,
        prompt_tokens=Array.of("int32", [1]),
        prompt_text="",
        problem={},
    )


def some_weights(num_bytes: int, *, version: int = 0) -> tuple[WeightManifest, bytes]:
    """Random weights and their manifest, in chunks of 1 MB."""
    payload = os.urandom(num_bytes)
    chunk_bytes = 1024 * 1024
    manifest = WeightManifest(
        id=f"weight_manifest:p:0:{version}:{hashlib.sha256(payload).hexdigest()[:8]}",
        pipeline="p",
        incarnation=0,
        version=version,
        tensors=(),
        num_bytes=num_bytes,
        num_chunks=-(-num_bytes // chunk_bytes),
        chunk_bytes=chunk_bytes,
        sha256=hashlib.sha256(payload).hexdigest(),
        model_config="{}",
    )
    return manifest, payload


async def take(reading: AsyncIterator[T], num: int, *, within_s: float = 20) -> list[T]:
    """The next `num` items."""
    async with asyncio.timeout(within_s):
        return [await anext(reading) for _ in range(num)]


async def events_after(bus: NatsBus, after: int, num: int) -> list[StoredEvent]:
    """`num` stored events."""
    reading = bus.read_events(after)
    try:
        return await take(reading, num)
    finally:
        await reading.aclose()  # type: ignore[attr-defined]


async def dead_letters(bus: NatsBus) -> list[DeadLetter]:
    """All stored dead letters."""
    stream = bus.subjects.dead_letters_stream().name
    num = (await bus.fill(stream)).num_messages
    letters = [await bus.load(Ref(stream, sequence + 1)) for sequence in range(num)]
    return letters


async def until(condition: Callable[[], bool], *, within_s: float = 10) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run something beside the test and cancel it at the end."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
