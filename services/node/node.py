"""The supervisor of one machine: registers its devices, runs the tenants that the scheduler places
here, says that it lives. It decides nothing and adopts nothing: at start it kills what an earlier
node left behind, and tells the scheduler that it holds no tenant."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import structlog

from jigsawrl import __version__
from jigsawrl.bus.base import Bus
from jigsawrl.contract.commands import (
    Command,
    ReleaseNode,
    RestartTenant,
    SetShares,
    StartTenant,
    StopTenant,
)
from jigsawrl.contract.events import (
    Heartbeat,
    NodeLeaving,
    NodeStarted,
    NodeStopped,
    SharesApplied,
    TenantStopped,
    WorkerExited,
    WorkerFailed,
)
from jigsawrl.contract.message import Worker, message_id
from jigsawrl.contract.spec import Device
from jigsawrl.devices.base import Actuator
from jigsawrl.devices.cgroups import remove_leftovers
from services.node.leftovers import Leftovers
from services.node.runs import folder_id
from services.node.shares import Shares
from services.node.tenant import STOP_GRACE_S, TenantCommand, TenantProcess

log = structlog.get_logger()

HEARTBEAT_PERIOD_S = 2.0


class _SentAwayError(Exception):
    """The scheduler does not want this node."""


class Node:
    """One boot of one node."""

    def __init__(
        self,
        bus: Bus,
        identity: Worker,
        devices: tuple[Device, ...],
        *,
        actuators: Mapping[str, Actuator],
        tenant_environment: Mapping[str, str] = MappingProxyType({}),
        url: str,
        state_folder: Path,
        runs_folder: Path,
        credentials_folder: Path | None = None,
        notice_s: float = 0.0,
    ) -> None:
        """`tenant_environment`: variables that every tenant gets. `notice_s`: of a leave."""
        self._bus = bus
        self._identity = identity
        self._tenant_environment = tenant_environment
        self._devices = {device.id: device for device in devices}
        self._url = url
        self._runs_folder = runs_folder
        self._runs_id = folder_id(runs_folder)
        self._home = f"{socket.gethostname()}:{state_folder.resolve()}"
        self._credentials_folder = credentials_folder
        """Each tenant is handed its role's file from there."""
        self._logs = state_folder / "logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        self._leftovers = Leftovers(state_folder / "processes.json")
        self._shares = Shares(
            {device.id: actuators[device.kind] for device in devices}, pid_of=self._pid_of
        )
        self._tenants: dict[str, TenantProcess] = {}
        self._ending: dict[str, asyncio.Task[None]] = {}
        """Tenants that were told to stop: beside the command loop, so that a slow one delays neither
        the others nor the next pipeline's start."""
        self._released = asyncio.Event()
        self._is_leaving = False
        self._notice_s = notice_s
        self._leaves_s = -math.inf
        """When its notice is over, by this machine's monotonic clock."""
        self.sent_away: str | None = None
        """Why the scheduler does not want this node, for people."""
        self._leader_epoch = 0
        self._counter = itertools.count()

    async def live(self) -> None:
        """Until cancelled, or sent away."""
        num_killed = self._leftovers.kill_all()
        if num_killed:
            log.warning("killed what an earlier node left behind", num_processes=num_killed)
        num_removed = await asyncio.to_thread(remove_leftovers)
        if num_removed:
            log.warning("removed control groups of dead nodes", num_groups=num_removed)
        await self._bus.bind_commands(self._identity)
        log.info("ready", node=self._identity.id, devices=list(self._devices))
        await self._bus.publish_event(
            NodeStarted(
                id=message_id(NodeStarted.tag(), self._identity.id, self._identity.boot),
                node=self._identity,
                devices=tuple(self._devices.values()),
                runs_id=self._runs_id,
                home=self._home,
                code_version=__version__,
                clock_s=time.time(),
            )
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._beat())
                group.create_task(self._tell_shares())
                group.create_task(self._bus.consume_commands(self._identity, self._on_command))
                group.create_task(self._end_if_sent_away())
        except* _SentAwayError:
            log.error("sent away", reason=self.sent_away)

    async def take_leave(self) -> None:
        """Have what is here handed over; returns when that is done, or the notice is over."""
        notice_s = self._notice_s
        self._is_leaving = True
        self._leaves_s = time.monotonic() + notice_s
        log.info("leaving", notice_s=notice_s)
        leaving = NodeLeaving(
            id=self._new_id(NodeLeaving.tag()),
            node=self._identity,
            notice_s=notice_s,
            reason="told to stop",
        )
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(notice_s):
                await self._bus.publish_event(leaving)
                await self._released.wait()

    async def stop(self, reason: str) -> None:
        """Stop all tenants, then say so."""
        for tenant in list(self._tenants):
            self._end(tenant)
        await asyncio.gather(*self._ending.values())
        await self._shares.restore()
        await self._bus.publish_event(
            NodeStopped(id=self._new_id(NodeStopped.tag()), node=self._identity, reason=reason)
        )

    async def _end_if_sent_away(self) -> None:
        await self._released.wait()
        if self.sent_away is not None:
            raise _SentAwayError

    async def _beat(self) -> None:
        while True:
            await self._bus.publish_event(
                Heartbeat(
                    id=self._new_id(Heartbeat.tag()), node=self._identity, clock_s=time.time()
                )
            )
            await asyncio.sleep(HEARTBEAT_PERIOD_S)

    async def _tell_shares(self) -> None:
        while True:
            report = await self._shares.reports.get()
            await self._bus.publish_event(
                SharesApplied(
                    id=self._new_id(SharesApplied.tag()),
                    cause=report.cause,
                    node=self._identity,
                    device=report.device,
                    shares=report.shares,
                    mechanism=report.mechanism,
                    fell_back=report.fell_back,
                )
            )

    def running(self) -> dict[str, int]:
        """Tenants whose process runs: id -> process id."""
        pids = ((tenant, self._pid_of(tenant)) for tenant in self._tenants)
        return {tenant: pid for tenant, pid in pids if pid is not None}

    def _pid_of(self, tenant: str) -> int | None:
        process = self._tenants.get(tenant)
        return None if process is None else process.pid

    async def _on_command(self, command: Command) -> None:
        if command.leader_epoch < self._leader_epoch:
            log.warning("refused a command of a deposed leader", command=command.id)
            return
        self._leader_epoch = command.leader_epoch
        if isinstance(command, StartTenant):
            await self._start(command)
        elif isinstance(command, StopTenant):
            self._end(command.tenant, is_told=True)
            if command.tenant not in self._ending:  # nothing of that name runs here
                await self._tell_stopped(command.tenant)
        elif isinstance(command, RestartTenant):
            process = self._tenants.get(command.tenant)
            if process is not None and process.restart(command.boot):
                log.info("restarting", tenant=command.tenant)
        elif isinstance(command, SetShares):
            await self._shares.divide(command.device, dict(command.shares), cause=command.id)
        elif isinstance(command, ReleaseNode):
            if not self._is_leaving:
                self.sent_away = command.reason
            self._released.set()

    def _end(self, tenant: str, *, is_told: bool = False) -> None:
        process = self._tenants.pop(tenant, None)
        self._shares.remove(tenant)
        if process is not None:
            ending = self._stop_one(tenant, process, is_told=is_told)
            self._ending[tenant] = asyncio.create_task(ending)

    async def _stop_one(self, tenant: str, process: TenantProcess, *, is_told: bool) -> None:
        try:
            await process.stop(grace_s=self._grace_s())
            await self._shares.let_go()
            log.info("stopped", tenant=tenant)
            if is_told:
                await self._tell_stopped(tenant)
        finally:
            del self._ending[tenant]

    async def _tell_stopped(self, tenant: str) -> None:
        id = self._new_id(TenantStopped.tag())
        await self._bus.publish_event(TenantStopped(id=id, node=self._identity, tenant=tenant))

    def _grace_s(self) -> float:
        """For a process to end: what is left of the notice, where this machine leaves."""
        left_s = self._leaves_s - time.monotonic()
        return max(STOP_GRACE_S, left_s - STOP_GRACE_S)

    async def _start(self, command: StartTenant) -> None:
        if command.tenant in self._tenants:
            return
        if command.device is not None and command.device not in self._devices:
            worker = Worker(id=command.tenant, boot=f"{self._identity.boot}-none")
            known = ", ".join(sorted(self._devices))
            reason = f"node {self._identity.id} has no device {command.device}, only {known}"
            await self._failed(command.pipeline, worker, reason)
            return
        if command.tenant in self._ending:  # two processes of one name must not meet
            await asyncio.wait([self._ending[command.tenant]])
        log.info("starting", tenant=command.tenant, device=command.device)
        if command.device is not None:
            self._shares.add(command.tenant, device=command.device, share=command.share)
        self._tenants[command.tenant] = TenantProcess(
            self._tenant_command(command),
            self._leftovers,
            on_start=lambda: self._shares.started(command.tenant),
            on_exit=lambda worker, code, reason: self._exited(
                command.pipeline, worker, code, reason
            ),
            on_failure=lambda worker, reason: self._failed(command.pipeline, worker, reason),
        )

    def _tenant_command(self, command: StartTenant) -> TenantCommand:
        program = "rollout" if command.role == "evaluation" else command.role
        argv = [sys.executable, "-m", f"services.{program}", "--url", self._url]
        argv += ["--prefix", self._bus.subjects.prefix, "--pipeline", command.pipeline]
        argv += ["--worker", command.tenant, "--node", self._identity.id]
        if self._credentials_folder is not None:
            argv += ["--credentials", str(self._credentials_folder / f"{command.role}.pem")]
        if program == "rollout":
            argv += ["--role", command.role]
        if command.role == "trainer":
            argv += ["--run-folder", str(self._runs_folder / command.pipeline)]
            # It ends by itself before it is killed, and that before this machine is gone.
            stop_timeout_s = max(STOP_GRACE_S - 1.0, self._notice_s - 2 * STOP_GRACE_S)
            argv += ["--stop-timeout", str(stop_timeout_s)]
        environment = {"OMP_NUM_THREADS": "1", **self._tenant_environment}
        device = None if command.device is None else self._devices[command.device]
        if device is not None:
            argv += ["--device", device.id]
        if device is None or device.kind == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        else:
            environment["CUDA_VISIBLE_DEVICES"] = str(device.index)
        return TenantCommand(
            tenant=command.tenant,
            argv=argv,
            environment=environment,
            cores=_cores(command, device),
            log=self._logs / f"{command.tenant}.log",
        )

    async def _exited(self, pipeline: str, worker: Worker, exit_code: int, reason: str) -> None:
        log.warning("exited", tenant=worker.id, reason=reason)
        await self._bus.publish_event(
            WorkerExited(
                id=message_id(WorkerExited.tag(), worker.id, worker.boot),
                pipeline=pipeline,
                worker=worker,
                exit_code=exit_code,
                reason=reason,
            )
        )

    async def _failed(self, pipeline: str, worker: Worker, reason: str) -> None:
        log.error("gave up", tenant=worker.id, reason=reason)
        await self._bus.publish_event(
            WorkerFailed(
                id=message_id(WorkerFailed.tag(), worker.id, worker.boot),
                pipeline=pipeline,
                worker=worker,
                reason=reason,
            )
        )

    def _new_id(self, tag: str) -> str:
        return message_id(tag, self._identity.id, self._identity.boot, next(self._counter))


def _cores(command: StartTenant, device: Device | None) -> tuple[int, ...]:
    """To pin it to; none = as this process."""
    if device is None or device.kind != "cpu" or not command.pinned:
        return ()
    return (device.index,)
