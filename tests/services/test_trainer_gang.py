"""A trainer of two ranks as two real processes; the test plays scheduler and node."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.config import encode_config
from jigsawrl.contract.commands import Command, Configure
from jigsawrl.contract.events import (
    CheckpointCommitted,
    VersionPublished,
    WorkerReady,
    WorkerRefused,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from jigsawrl.models.weights import unpack
from tests.services.test_trainer import CONFIG, make_cut, publish_command

TIMEOUT_S = 90
"""Long, since each rank imports torch, perhaps beside other tests."""


class Ranks:
    """Processes of one pipeline's trainer, gang after gang."""

    def __init__(self, bus: NatsBus, url: str, prefix: str, run_folder: Path) -> None:
        self._bus = bus
        self._run_folder = run_folder
        self._arguments = ["-m", "services.trainer", "--url", url, "--prefix", prefix]
        self._arguments += ["--pipeline", "p", "--run-folder", str(run_folder)]
        self._num_commands = 0
        self.gang_epoch = 0
        self.processes: list[asyncio.subprocess.Process] = []
        self.events: list[Any] = []

    async def start(self, num_ranks: int) -> None:
        """The next gang, up to its readiness."""
        self.gang_epoch += 1
        first = len(self.events)
        self.processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, *self._arguments),
                *("--worker", f"p.trainer{rank}", "--boot", f"b{self.gang_epoch}"),
            )
            for rank in range(num_ranks)
        ]
        await self.until(lambda: self.count(WorkerStarted, first) == num_ranks)
        for rank in range(num_ranks):
            command = Configure(
                id=f"configure{self.gang_epoch}.{rank}",
                worker=self.worker(rank),
                leader_epoch=1,
                config=encode_config(CONFIG),
                incarnation=1,
                gang_epoch=self.gang_epoch,
                rank=rank,
                num_ranks=num_ranks,
            )
            await self._bus.publish_command(command)
        await self.until(lambda: self.count(WorkerReady, first) == num_ranks)

    def worker(self, rank: int) -> Worker:
        return Worker(id=f"p.trainer{rank}", boot=f"b{self.gang_epoch}")

    async def tell(self, command: Command, *ranks: int) -> None:
        """One command to some ranks, or to all; under a new id each time, as a repeat whose id the bus
        has forgotten."""
        for rank in ranks or range(len(self.processes)):
            self._num_commands += 1
            changes = {"id": f"c{self._num_commands}", "worker": self.worker(rank)}
            await self._bus.publish_command(msgspec.structs.replace(command, **changes))

    async def train(self, version: int, *ranks: int, incarnation: int = 1) -> None:
        cut = await make_cut(self._bus, version, self.gang_epoch, incarnation=incarnation)
        await self.tell(cut, *ranks)

    async def published(self, version: int) -> VersionPublished:
        """The announcement of a version by this gang."""
        found: list[VersionPublished] = []

        def there() -> bool:
            found[:] = [
                event
                for event in self.events
                if isinstance(event, VersionPublished)
                and (event.version, event.gang_epoch) == (version, self.gang_epoch)
            ]
            return bool(found)

        await self.until(there)
        return found[0]

    async def weights(self, event: VersionPublished) -> tuple[str, dict[str, torch.Tensor]]:
        manifest, payload = await self._bus.fetch_weights(event.manifest)
        return manifest.sha256, unpack(manifest, payload)

    def count(self, kind: type, first: int = 0) -> int:
        return sum(isinstance(event, kind) for event in self.events[first:])

    async def until(self, condition: Any) -> None:
        """Read events until something is so."""
        stream = self._bus.read_events(len(self.events))
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.events.append((await anext(stream)).event)  # type: ignore[call-overload]
                assert not self.count(WorkerRefused), self.events[-1]

    async def end(self, number: signal.Signals) -> list[int]:
        """A signal to all; their exit statuses."""
        for process in self.processes:
            if process.returncode is None:
                process.send_signal(number)
        return [await process.wait() for process in self.processes]


@pytest.fixture
async def ranks(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> AsyncIterator[Ranks]:
    made = Ranks(bus, nats_server.url, prefix, tmp_path)
    yield made
    await made.end(signal.SIGKILL)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)


async def test_two_ranks_speak_as_one_stop_together_and_resume_at_any_number(
    ranks: Ranks, tmp_path: Path
) -> None:
    await ranks.start(2)
    await ranks.tell(publish_command(0))
    for version in range(2):
        await ranks.train(version)
    await ranks.published(2)
    # What comes again to one rank only must not leave it waiting for the other.
    await ranks.train(1, 1)
    await ranks.train(1, 0)
    await ranks.tell(publish_command(2), 0)
    await ranks.tell(publish_command(2), 1)
    await ranks.train(2)
    third = await ranks.published(3)
    assert third.worker == ranks.worker(0)
    speakers = {e.worker.id for e in ranks.events if isinstance(e, CheckpointCommitted)}
    assert speakers == {"p.trainer0"}
    assert [e.version for e in ranks.events if isinstance(e, VersionPublished)] == [0, 1, 2, 3]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    digest, _ = await ranks.weights(third)
    # The status is not checked: on a busy machine the interpreter's own end may pass the deadline.
    await ranks.end(signal.SIGTERM)
    assert (tmp_path / "checkpoints" / "v3-e1" / "COMMITTED").exists()  # every second is due

    await ranks.start(2)
    await ranks.tell(msgspec.structs.replace(publish_command(3), gang_epoch=2))
    assert (await ranks.weights(await ranks.published(3)))[0] == digest
    await ranks.train(3)
    digest, expected = await ranks.weights(await ranks.published(4))
    await ranks.end(signal.SIGKILL)

    for path in (tmp_path / "checkpoints").glob("v4-*"):
        (path / "COMMITTED").unlink()  # back to version 3
    await ranks.start(2)
    await ranks.train(3)
    assert (await ranks.weights(await ranks.published(4)))[0] == digest
    await ranks.end(signal.SIGKILL)

    for path in (tmp_path / "checkpoints").glob("v4-*"):
        (path / "COMMITTED").unlink()
    await ranks.start(1)
    await ranks.train(3, incarnation=2)  # other bits, another name
    _, alone = await ranks.weights(await ranks.published(4))
    assert_close(alone, expected)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_rank_whose_peer_died_ends_within_seconds_instead_of_waiting(
    ranks: Ranks, victim: int
) -> None:
    await ranks.start(2)
    ranks.processes[victim].kill()
    await ranks.processes[victim].wait()
    await ranks.train(0, 1 - victim)
    async with asyncio.timeout(15):
        assert await ranks.processes[1 - victim].wait() == 1
    assert not ranks.count(VersionPublished)


async def test_a_rank_that_waits_for_a_frozen_peer_stops_when_told(ranks: Ranks) -> None:
    await ranks.start(2)
    ranks.processes[1].send_signal(signal.SIGSTOP)
    await ranks.train(0, 0)
    await asyncio.sleep(1)
    ranks.processes[0].send_signal(signal.SIGTERM)
    async with asyncio.timeout(6):
        await ranks.processes[0].wait()
