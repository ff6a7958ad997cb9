"""Asks a cluster's scheduler, near or far: submit, status, pause, resume, cancel, top.

Called by `main`. Each command is one client that connects, asks and goes; which cluster is said by
``--url``, else by the daemon of a folder on this machine.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from jigsawrl.bus.base import Bus, BusError
from jigsawrl.bus.client import connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.cli.errors import EXIT_BAD_INPUT, EXIT_FAILED, CommandError
from jigsawrl.cli.pipeline_client import PipelineClient, View
from jigsawrl.cli.status_text import describe_pipeline, overview
from jigsawrl.cli.summary import succeeded
from jigsawrl.config import PipelineConfig, encode_config
from jigsawrl.contract.message import message_id
from jigsawrl.contract.requests import (
    Cancel,
    Pause,
    PipelineStatus,
    Resume,
    Status,
    StatusQuery,
    Submit,
    Submitted,
)

CONNECT_TIMEOUT_S = 5.0

ANSWER_TIMEOUT_S = 15.0
"""A scheduler that restarts takes a few seconds."""

REFRESH_S = 1.0

Change = type[Cancel] | type[Pause] | type[Resume]


class Cluster:
    """The scheduler of one cluster, as a client sees it."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._id = uuid.uuid4().hex[:12]
        self._num_asked = 0

    async def status(self) -> Status:
        """All pipelines, now."""
        self._num_asked += 1
        query = StatusQuery(id=message_id(StatusQuery.tag(), self._id, self._num_asked))
        status: Status = await self._ask(query)
        return status

    async def submit(self, config: PipelineConfig, *, companions: Sequence[str]) -> None:
        """Raises `CommandError` where it is refused."""
        submit = Submit(
            id=message_id(Submit.tag(), config.name, self._id),
            config=encode_config(config),
            companions=tuple(companions),
        )
        await self._change(submit)

    async def change(self, kind: Change, pipeline: str) -> None:
        """Cancel, pause or resume it; raises `CommandError` where that is refused."""
        id = message_id(kind.tag(), pipeline, self._id)
        if kind is Cancel:
            await self._change(Cancel(id=id, pipeline=pipeline, reason="by its user"))
        else:
            assert issubclass(kind, Pause | Resume)
            await self._change(kind(id=id, pipeline=pipeline))

    async def _change(self, request: Submit | Cancel | Pause | Resume) -> None:
        answer: Submitted = await self._ask(request)
        if answer.error is not None:
            raise CommandError(answer.error, status=EXIT_BAD_INPUT)

    async def _ask(self, request: Any) -> Any:
        return await self.bus.request("scheduler", request, timeout_s=ANSWER_TIMEOUT_S)


class Address(NamedTuple):
    """Where a cluster is, and who we are to it."""

    url: str
    credentials: Path | None
    """A client's file, or the folder of its group."""


def ask(address: Address, asking: Callable[[Cluster], Coroutine[Any, Any, int]]) -> int:
    """Connect, ask, disconnect; the exit status. Raises `CommandError` where nobody answers."""

    async def connected() -> int:
        path = address.credentials
        bus = await connect(
            address.url,
            name="jigsaw",
            timeout_s=CONNECT_TIMEOUT_S,
            credentials=None if path is None else read_credentials(path, "client"),
        )
        try:
            return await asking(Cluster(bus))
        finally:
            await bus.close()

    try:
        return asyncio.run(connected())
    except BusError as error:
        raise CommandError(str(error), status=EXIT_FAILED) from None


async def submit(
    cluster: Cluster,
    configs: Sequence[PipelineConfig],
    *,
    start_together: bool,
    exist_ok: bool = False,
    view: View | None,
) -> int:
    """Submit them in order; with a `view` watch them to their ends. With `exist_ok` those that run or
    have finished there are left as they are. One that is refused keeps no other from its turn."""
    known = {p.pipeline: p for p in (await cluster.status()).pipelines}
    there = {name for name, p in known.items() if exist_ok and p.state != "failed"}
    names = [config.name for config in configs]
    new = [config for config in configs if config.name not in there]
    for config in new:
        _check_new(config, known.get(config.name))
    refused: dict[str, str] = {}
    for config in new:
        companions = [name for name in names if start_together and name != config.name]
        try:
            await cluster.submit(config, companions=companions)
        except CommandError as error:
            refused[config.name] = str(error)
    for pipeline in (await cluster.status()).pipelines:
        if pipeline.pipeline in names and pipeline.state == "failed":
            refused.setdefault(pipeline.pipeline, f"{pipeline.pipeline}: {pipeline.failure}")
    for reason in refused.values():
        print(f"jigsaw submit: {reason}", file=sys.stderr)
    status = EXIT_BAD_INPUT if refused else 0
    going = [config for config in configs if config.name not in refused]
    if view is None or not going:
        for config in going:
            done = "is there already" if config.name in there else "is submitted"
            print(f"{config.name} {done}: see how it goes with jigsaw status {config.name}")
        return status
    client = PipelineClient(cluster.bus, going, view, run_id=uuid.uuid4().hex[:12])
    ended = await client.watch()
    return status if all(map(succeeded, ended)) else EXIT_FAILED


def _check_new(config: PipelineConfig, known: PipelineStatus | None) -> None:
    """What has ended well would end at once again; what failed goes on from its checkpoints."""
    if known is not None and known.state == "finished":
        raise CommandError(
            f"pipeline {config.name} has finished here: choose another name", status=EXIT_BAD_INPUT
        )


async def show(cluster: Cluster, pipeline: str | None, *, as_json: bool) -> int:
    """Print the status of all pipelines, or of one in full."""
    status = await cluster.status()
    if as_json:
        shown = status if pipeline is None else _named(status, pipeline)
        print(msgspec.json.encode(shown).decode())
    elif pipeline is None:
        for line in overview(status):
            print(line)
    else:
        for line in describe_pipeline(_named(status, pipeline)):
            print(line)
    return 0


async def change(cluster: Cluster, kind: Change, pipeline: str) -> int:
    """Cancel, pause or resume one, and say so."""
    known = _named(await cluster.status(), pipeline)
    if known.state in ("finished", "failed"):
        raise CommandError(f"pipeline {pipeline} has {known.state} already", status=EXIT_BAD_INPUT)
    await cluster.change(kind, pipeline)
    done = {Cancel: "cancelled", Pause: "paused: what runs ends", Resume: "resumed"}[kind]
    print(f"{pipeline}: {done}")
    return 0


async def top(cluster: Cluster, view: View) -> int:
    """Show all pipelines until interrupted; a scheduler that is away is waited for."""
    while True:
        try:
            view.on_status(await cluster.status(), now_s=time.monotonic())
        except BusError as error:
            view.on_notice(f"waiting for the scheduler: {error}")
        await asyncio.sleep(REFRESH_S)


def _named(status: Status, pipeline: str) -> PipelineStatus:
    for one in status.pipelines:
        if one.pipeline == pipeline:
            return one
    known = ", ".join(p.pipeline for p in status.pipelines) or "none"
    raise CommandError(f"there is no pipeline {pipeline}; here are: {known}", status=EXIT_BAD_INPUT)
