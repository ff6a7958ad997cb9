"""What all tenant services share: arguments, the event loop, the life of one boot.

A tenant connects, makes its command consumer, publishes `WorkerStarted`, gets `Configure`, sets
itself up, publishes `WorkerReady`, then handles commands until it is told to stop. It knows only its
pipeline's name, its own id and the bus; its configuration comes by command. Leaders with an older
epoch than one it has heard are refused here, for all services alike.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from jigsawrl import __version__
from jigsawrl.bus.base import Bus, RecordGoneError
from jigsawrl.bus.client import connect
from jigsawrl.config import PipelineConfig, decode_config
from jigsawrl.contract.commands import Command, Configure
from jigsawrl.contract.events import WorkerAlive, WorkerReady, WorkerRefused, WorkerStarted
from jigsawrl.contract.message import Ledger, Ref, Role, Worker, message_id
from jigsawrl.contract.records import Record
from jigsawrl.contract.requests import Activity
from jigsawrl.observe import about, configure_logging
from services.credentials import add_credentials, credentials_of
from services.stopping import run_program, until_told_to_stop
from services.tenant_metrics import TenantMetrics, build_tenant_metrics

log = structlog.get_logger()

NUM_RECORDS = 16
"""Records that one tenant loads or stores at once; the broker's acks are waited for together."""

REMINDER_S = 10.0
"""A start without a configuration is worth a line after this; on a busy machine it may take seconds."""

ALIVE_PERIOD_S = 10.0
"""Between two signs of life; the scheduler takes a tenant for lost after three that it misses."""

CONNECT_TIMEOUT_S = 60.0
"""A server that restarts on a large store may need a while; meanwhile no start counts as failed."""

EXIT_REFUSED = 3
"""Exit status of a tenant whose configuration can't work: the node does not restart it."""


class RefusedError(Exception):
    """Raised by `Tenant.configure` for a configuration that cannot work here; one line for people."""


class Context:
    """What a tenant service is given: the bus, its identity, and ids for its messages."""

    def __init__(
        self,
        *,
        bus: Bus,
        worker: Worker,
        pipeline: str,
        run_folder: str | None,
        device: str | None,
        stop_timeout_s: float = 3.0,
    ) -> None:
        self.bus = bus
        self.worker = worker
        self.pipeline = pipeline
        self.run_folder = run_folder
        """Where the trainer writes; None for all others."""
        self.stop_timeout_s = stop_timeout_s
        """For a trainer's last checkpoint."""
        self.device = device
        """``node/cpu0``; None for tenants without one."""
        self._counter = itertools.count()
        self._records = asyncio.Semaphore(NUM_RECORDS)

    async def store(self, record: Record) -> Ref:
        """`Bus.store`, some at once."""
        async with self._records:
            return await self.bus.store(record)

    async def load(self, ref: Ref) -> Any:
        """`Bus.load`, some at once; None for a record that is no longer stored."""
        async with self._records:
            try:
                return await self.bus.load(ref)
            except RecordGoneError:
                return None

    def new_id(self, tag: str) -> str:
        """An id for a message of this boot."""
        return message_id(tag, self.worker.id, self.worker.boot, next(self._counter))

    def report(
        self, activity: str, *, num_done: int = 0, num_total: int | None = None, detail: str = ""
    ) -> None:
        """Tell people what this worker does now; may be lost."""
        self.bus.publish_activity(
            Activity(
                id=self.new_id(Activity.tag()),
                pipeline=self.pipeline,
                worker=self.worker.id,
                activity=activity,
                num_done=num_done,
                num_total=num_total,
                detail=detail,
            )
        )


class Restored(NamedTuple):
    """Where a trainer goes on."""

    version: int
    ledger: Ledger


class Tenant(Protocol):
    """One service; built with a `Context`, complete but idle."""

    role: Role
    concurrency: int
    """Commands handled at once; 1 keeps their order."""

    async def configure(self, config: PipelineConfig, command: Configure) -> Restored | None:
        """Set up; for a trainer what it restored. Raises `RefusedError`."""

    async def handle(self, command: Any) -> None:
        """Carry out one command; it is acked when this returns and repeated when it raises."""

    async def run(self) -> None:
        """Work beside commands, from `WorkerReady` until cancelled."""

    async def close(self) -> None:
        """Let go of threads and files; safe to call at any stage."""


class Life:
    """One boot of one tenant, from `WorkerStarted` to its end."""

    def __init__(
        self, context: Context, tenant: Tenant, *, node: str | None, metrics: TenantMetrics
    ) -> None:
        self._context = context
        self._tenant = tenant
        self._node = node
        self._metrics = metrics
        self._leader_epoch = 0
        self._configured = False
        self._ready = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.refusal: str | None = None

    async def live(self) -> None:
        """Until cancelled or refused."""
        context = self._context
        await context.bus.bind_commands(context.worker)
        await context.bus.publish_event(
            WorkerStarted(
                id=message_id(WorkerStarted.tag(), context.worker.id, context.worker.boot),
                pipeline=context.pipeline,
                worker=context.worker,
                role=self._tenant.role,
                node=self._node,
                device=context.device,
                code_version=__version__,
            )
        )
        async with asyncio.TaskGroup() as group:
            consuming = group.create_task(
                context.bus.consume_commands(
                    context.worker, self._on_command, concurrency=self._tenant.concurrency
                )
            )
            running = group.create_task(self._run_when_ready())
            beside = [group.create_task(self._remind()), group.create_task(self._beat())]
            try:
                await self._ended(consuming)
            finally:
                consuming.cancel()
                running.cancel()
                for task in beside:
                    task.cancel()

    async def _beat(self) -> None:
        context = self._context
        while True:
            await asyncio.sleep(ALIVE_PERIOD_S)
            self._metrics.note(context.bus.health)
            await context.bus.publish_event(
                WorkerAlive(
                    id=context.new_id(WorkerAlive.tag()),
                    pipeline=context.pipeline,
                    worker=context.worker,
                )
            )

    async def _remind(self) -> None:
        """Say what a tenant waits for that nobody configures: someone may have started it by hand."""
        await asyncio.sleep(REMINDER_S)
        if not self._configured:
            pipeline = self._context.pipeline
            log.warning(f"waits to be configured: does the scheduler run pipeline {pipeline}?")

    async def _run_when_ready(self) -> None:
        await self._ready.wait()
        await self._tenant.run()

    async def _ended(self, consuming: asyncio.Task[None]) -> None:
        """Returns when refused; raises what a command raised."""
        await asyncio.wait([consuming, self._failure], return_when=asyncio.FIRST_COMPLETED)
        if self._failure.done():
            self._failure.result()

    async def _on_command(self, command: Command) -> None:
        """Carry out one command. A fault ends the process, loudly: the node starts it again, the
        scheduler gives the new boot its work, and five faults in a minute fail the pipeline."""
        version = getattr(command, "version", None)
        with about(command=command.id, version=version):
            try:
                await self._carry_out(command)
            except Exception as error:
                if not self._failure.done():
                    self._failure.set_exception(error)
                raise

    async def _carry_out(self, command: Command) -> None:
        if command.leader_epoch < self._leader_epoch:
            log.warning("refused a command of a deposed leader", command=command.id)
            return
        self._leader_epoch = command.leader_epoch
        if isinstance(command, Configure):
            with self._metrics.command(command.tag()):
                await self._configure(command)
        else:
            await self._ready.wait()
            with self._metrics.command(command.tag()):
                await self._tenant.handle(command)

    async def _configure(self, command: Configure) -> None:
        context = self._context
        if self._configured:
            return
        self._configured = True
        try:
            restored = await self._tenant.configure(_config(command), command)
        except RefusedError as error:
            await context.bus.publish_event(
                WorkerRefused(
                    id=context.new_id(WorkerRefused.tag()),
                    cause=command.id,
                    pipeline=context.pipeline,
                    worker=context.worker,
                    reason=str(error),
                )
            )
            self.refusal = str(error)
            self._failure.set_result(None)
            return
        await context.bus.publish_event(
            WorkerReady(
                id=message_id(WorkerReady.tag(), context.worker.id, context.worker.boot),
                cause=command.id,
                pipeline=context.pipeline,
                worker=context.worker,
                role=self._tenant.role,
                version=None if restored is None else restored.version,
                ledger=None if restored is None else restored.ledger,
                gang_epoch=command.gang_epoch if self._tenant.role == "trainer" else None,
            )
        )
        self._ready.set()


def _config(command: Configure) -> PipelineConfig:
    """Raises `RefusedError` where this version knows no such configuration."""
    try:
        return decode_config(command.config)
    except msgspec.DecodeError as error:
        raise RefusedError(
            f"the configuration is of another version of JigsawRL ({error}): this worker runs"
            f" {__version__}; upgrade its node"
        ) from error


def parser(role: str) -> argparse.ArgumentParser:
    """The arguments that every tenant takes."""
    arguments = argparse.ArgumentParser(prog=f"python -m services.{role}")
    arguments.add_argument("--url", required=True, help="NATS server, nats://127.0.0.1:4222")
    arguments.add_argument("--pipeline", required=True, help="the pipeline this tenant works for")
    arguments.add_argument("--worker", help="tenant id; default PIPELINE.ROLE plus a random number")
    arguments.add_argument("--boot", default=uuid.uuid4().hex[:12], help="unique per start")
    arguments.add_argument("--node", help="the node that started it")
    arguments.add_argument("--device", help="its device, NODE/cpu0")
    arguments.add_argument("--prefix", default="jig", help="first token of all subjects")
    add_credentials(arguments)
    return arguments


def main(make: Callable[[Context], Tenant], arguments: argparse.Namespace, *, role: str) -> None:
    """Run one tenant process to its end and exit with its status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    arguments.worker = arguments.worker or f"{arguments.pipeline}.{role}-{uuid.uuid4().hex[:6]}"
    configure_logging(service=role, pipeline=arguments.pipeline, worker=arguments.worker)
    status = run_program(_main(make, arguments, role=role))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # tearing torch down takes seconds, and there is nothing left to do


async def _main(
    make: Callable[[Context], Tenant], arguments: argparse.Namespace, *, role: str
) -> int:
    worker_id: str = arguments.worker
    bus = await connect(
        arguments.url,
        name=worker_id,
        prefix=arguments.prefix,
        timeout_s=CONNECT_TIMEOUT_S,
        credentials=credentials_of(arguments, role),
    )
    context = Context(
        bus=bus,
        worker=Worker(id=worker_id, boot=arguments.boot),
        pipeline=arguments.pipeline,
        run_folder=getattr(arguments, "run_folder", None),
        stop_timeout_s=getattr(arguments, "stop_timeout", 3.0),
        device=arguments.device,
    )
    tenant = make(context)
    metrics = build_tenant_metrics(
        pipeline=context.pipeline, role=tenant.role, worker=context.worker.id
    )
    life = Life(context, tenant, node=arguments.node, metrics=metrics)
    try:
        await until_told_to_stop(life.live())
    finally:
        await tenant.close()
        await bus.close()
    if life.refusal is not None:
        log.error("refused", reason=life.refusal)
        return EXIT_REFUSED
    return 0
