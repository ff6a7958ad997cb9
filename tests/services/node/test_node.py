"""The node as a real process on a real nats-server; the test plays the scheduler."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.config import (
    InitModelConfig,
    JsonlTaskConfig,
    PipelineConfig,
    TrainerConfig,
    encode_config,
)
from jigsawrl.contract.commands import (
    Command,
    Configure,
    RestartTenant,
    SetShares,
    StartTenant,
    StopTenant,
)
from jigsawrl.contract.events import (
    Event,
    Heartbeat,
    NodeStarted,
    NodeStopped,
    SharesApplied,
    TenantStopped,
    WorkerExited,
    WorkerFailed,
    WorkerRefused,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from jigsawrl.devices.cgroups import ROOT

E = TypeVar("E", bound=Event)

TENANT = "p.environment0"
CORE = min(os.sched_getaffinity(0))


class Site:
    """One node process, and what a scheduler would see and say."""

    def __init__(self, bus: NatsBus, url: str, prefix: str, folder: Path) -> None:
        self.bus = bus
        self.folder = folder
        self._arguments = ["--url", url, "--prefix", prefix, "--node", "n", "--devices"]
        self._arguments += [f"cpu:{CORE}", "--state-dir", str(folder), "--runs-folder", str(folder)]
        self._after = 0
        self._num_commands = 0
        self.node: Worker | None = None
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> NodeStarted:
        """Start the node."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.node", *self._arguments
        )
        started = await self.next(NodeStarted)
        self.node = started.node
        return started

    async def next(self, kind: type[E]) -> E:
        """The next event of a kind."""
        async with asyncio.timeout(30):
            async for stored in self.bus.read_events(self._after):
                self._after = stored.sequence
                if isinstance(stored.event, kind):
                    return stored.event
        raise AssertionError("the stream ended")

    async def tell(
        self, kind: type[Command], *, worker: Worker | None = None, **fields: object
    ) -> None:
        """Send a command."""
        self._num_commands += 1
        fields = {"leader_epoch": 5, **fields}
        command = kind(id=f"c:{self._num_commands}", worker=worker or self.node, **fields)  # type: ignore[arg-type]
        await self.bus.publish_command(command)

    async def start_tenant(
        self, *, device: str | None = None
    ) -> tuple[WorkerStarted, psutil.Process]:
        """Start the environment, which needs nothing; its event and its process."""
        await self.tell(StartTenant, tenant=TENANT, role="environment", pipeline="p", device=device)
        started = await self.next(WorkerStarted)
        return started, self.tenant(started)

    def tenant(self, started: WorkerStarted) -> psutil.Process:
        """The process of a boot."""
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            if started.worker.boot in child.cmdline():
                return child
        raise AssertionError(f"no process of {started.worker}")


@pytest.fixture
async def site(
    bus: NatsBus, nats_server: EmbeddedServer, prefix: str, tmp_path: Path
) -> AsyncIterator[Site]:
    site = Site(bus, nats_server.url, prefix, tmp_path)
    yield site
    if site.process is not None and site.process.returncode is None:
        site.process.kill()
        await site.process.wait()


async def gone(process: psutil.Process, *, within_s: float) -> bool:
    """Whether a process ends in time; it may be no child of ours."""
    async with asyncio.timeout(within_s):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            await asyncio.sleep(0.02)
    return True


async def test_a_node_registers_its_devices_says_that_it_lives_and_pins_tenants(site: Site) -> None:
    started = await site.start()
    assert [device.id for device in started.devices] == [f"n/cpu{CORE}"]
    assert (await site.next(Heartbeat)).node == started.node
    event, process = await site.start_tenant(device=f"n/cpu{CORE}")
    assert event.worker.id == TENANT
    assert (event.node, event.device) == ("n", f"n/cpu{CORE}")
    assert process.cpu_affinity() == [CORE]
    assert process.environ()["OMP_NUM_THREADS"] == "1"
    assert "--run-folder" not in process.cmdline()


async def test_a_killed_tenant_is_told_and_comes_back_under_another_boot(site: Site) -> None:
    await site.start()
    first, process = await site.start_tenant()
    process.kill()
    exited = await site.next(WorkerExited)
    assert exited.worker == first.worker
    assert exited.exit_code == -signal.SIGKILL
    second = await site.next(WorkerStarted)
    assert second.worker.id == first.worker.id
    assert second.worker.boot != first.worker.boot


async def test_one_boot_is_restarted_on_order_and_no_other(site: Site) -> None:
    await site.start()
    first, process = await site.start_tenant()
    await site.tell(RestartTenant, tenant=TENANT, boot="another")
    await site.tell(RestartTenant, tenant="p.nobody", boot=first.worker.boot)
    await site.tell(RestartTenant, tenant=TENANT, boot=first.worker.boot)
    second = await site.next(WorkerStarted)
    assert await gone(process, within_s=5)
    assert second.worker.boot != first.worker.boot
    await site.tell(RestartTenant, tenant=TENANT, boot=first.worker.boot)  # delivered again
    await site.tell(StopTenant, tenant="p.nobody")
    await site.next(Heartbeat)
    await site.next(Heartbeat)
    assert site.tenant(second).is_running()


async def test_a_refused_configuration_fails_the_tenant_once_with_its_reason(site: Site) -> None:
    await site.start()
    started, _ = await site.start_tenant()
    config = PipelineConfig(
        name="p",
        model=InitModelConfig(),
        task=JsonlTaskConfig(path="/nowhere/at/all.jsonl", reward="exact"),
        trainer=TrainerConfig(num_steps=1),
    )
    await site.tell(
        Configure,
        worker=started.worker,
        config=encode_config(config),
        incarnation=0,
        gang_epoch=0,
    )
    refused = await site.next(WorkerRefused)
    assert "/nowhere/at/all.jsonl" in refused.reason
    failed = await site.next(WorkerFailed)
    assert failed.worker == started.worker
    assert "exit status 3" in failed.reason
    assert "/nowhere/at/all.jsonl" in failed.reason


async def test_a_stopped_tenant_stays_away_and_can_be_started_again(site: Site) -> None:
    await site.start()
    first, process = await site.start_tenant()
    await site.tell(StopTenant, tenant=TENANT)
    assert await gone(process, within_s=5)
    assert (await site.next(TenantStopped)).tenant == TENANT
    await site.tell(StopTenant, tenant="p.nobody")
    assert (await site.next(TenantStopped)).tenant == "p.nobody", "nothing is waited for in vain"
    second, _ = await site.start_tenant()
    assert second.worker.boot != first.worker.boot
    assert second.cause == ""


async def test_a_deposed_leader_cannot_stop_a_tenant(site: Site) -> None:
    await site.start()
    _, process = await site.start_tenant()
    await site.tell(StopTenant, tenant=TENANT, leader_epoch=4)
    await asyncio.sleep(0.5)
    assert process.is_running()


async def test_a_device_that_the_node_lacks_fails_that_pipeline_with_the_ones_it_has(
    site: Site,
) -> None:
    await site.start()
    await site.tell(StartTenant, tenant=TENANT, role="environment", pipeline="p", device="n/cuda7")
    failed = await site.next(WorkerFailed)
    assert failed.pipeline == "p"
    assert f"no device n/cuda7, only n/cpu{CORE}" in failed.reason
    assert await site.start_tenant(device=f"n/cpu{CORE}")


def groups_of(node: asyncio.subprocess.Process) -> dict[str, list[str]]:
    """Control groups of tenants, of either version, that a node made: name -> members."""
    groups = ROOT.rglob(f"jigsawrl-*-{node.pid}-*/tenant-*")
    return {g.name: (g / "cgroup.procs").read_text().split() for g in groups}


async def test_shares_are_applied_to_each_process_of_a_tenant_and_nothing_is_left(
    site: Site,
) -> None:
    device = f"n/cpu{CORE}"
    await site.start()
    assert site.process is not None
    await site.tell(
        StartTenant, tenant=TENANT, role="environment", pipeline="p", device=device, share=0.5
    )
    first = await site.next(SharesApplied)
    assert (first.node, first.device) == (site.node, device)
    assert [(s.tenant, s.asked) for s in first.shares] == [(TENANT, 0.5)]
    process = site.tenant(await site.next(WorkerStarted))
    await site.tell(SetShares, device=device, shares=((TENANT, 0.25), ("q.rollout0", 0.75)))
    answer = await site.next(SharesApplied)
    assert answer.cause == "c:2"
    assert [(s.tenant, s.asked) for s in answer.shares] == [(TENANT, 0.25)]
    process.kill()
    again = await site.next(SharesApplied)
    assert [(s.tenant, s.asked) for s in again.shares] == [(TENANT, 0.25)]
    process = site.tenant(await site.next(WorkerStarted))
    if again.fell_back is None:
        assert groups_of(site.process) == {f"tenant-{TENANT}": [str(process.pid)]}
    await site.tell(SetShares, device=device, shares=((TENANT, 0.75), ("q.rollout0", 0.75)))
    refused = await site.next(SharesApplied)
    assert "shares sum to 1.5" in (refused.fell_back or "")
    site.process.terminate()
    await site.process.wait()
    assert groups_of(site.process) == {}


async def test_sigterm_stops_all_tenants_and_says_so_within_five_seconds(site: Site) -> None:
    await site.start()
    _, process = await site.start_tenant()
    assert site.process is not None
    site.process.terminate()
    async with asyncio.timeout(5):
        assert await site.process.wait() == 0
    assert not process.is_running()
    assert (await site.next(NodeStopped)).node == site.node


async def test_tenants_die_with_a_killed_node_and_the_next_one_starts_clean(site: Site) -> None:
    await site.start()
    _, process = await site.start_tenant(device=f"n/cpu{CORE}")
    assert site.process is not None
    site.process.kill()
    await site.process.wait()
    assert await gone(process, within_s=2)
    old, killed = site.node, site.process
    await site.start()
    assert site.node is not None
    assert old is not None
    assert site.node.boot != old.boot
    assert groups_of(killed) == {}
    assert await site.start_tenant()
