"""The whole system on this machine: nats-server, scheduler and node, started, watched, stopped; or
scheduler and node at NATS servers that are there already.

Called by `run_command` and `daemon`. The node starts the rest (environment, reward, rollout, trainer,
evaluation) as the scheduler places it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Literal

import msgspec

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.bus.server import LOOPBACK, EmbeddedServer, start_server
from jigsawrl.bus.server_config import Tls
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.cli.metrics_addresses import MetricsAddresses
from jigsawrl.cli.node_command import default_name
from jigsawrl.cli.run_folder import PROFILE_FILE
from jigsawrl.cli.supervisor import Child, Program, StartError, keep_alive
from jigsawrl.config import PipelineConfig
from jigsawrl.devices.gpus import NVIDIA_SMI_TIMEOUT_S, find_gpus

PROGRAM_GRACE_S = 3.5
"""For scheduler and node together; with the server's part a stop takes less than 5 s. Tenants of a
node that does not end in time die with it."""

Devices = Literal["auto", "cpu", "none"]
"""Of this machine: GPUs if it has some, CPU slots in any case, or nothing runs on it."""

REACH_TIMEOUT_S = 5.0
"""For somebody else's NATS servers to answer."""

EXIT_POLL_S = 0.1
"""How often a nats-server is looked at; it is no asyncio child."""


class Listening(msgspec.Struct, frozen=True, kw_only=True):
    """Where the embedded nats-server listens, and to whom; or those that are there already."""

    host: str = LOOPBACK
    port: int | None = None
    """None: any free one."""
    tls: Tls | None = None
    credentials: Path | None = None
    """The group's folder, for the programs on this machine."""
    sync_interval: str | None = None
    """See `jigsawrl.bus.server_config.ServerSettings`."""
    url: str | None = None
    """Of NATS servers that somebody else keeps: none is started."""


class Server:
    """The nats-server as a `Child`: it comes back on the same port with the same store."""

    def __init__(self, store_folder: Path, listening: Listening | None = None) -> None:
        self.name = "nats-server"
        self.log_path = store_folder / "nats-server.log"
        self._store_folder = store_folder
        self._listening = listening or Listening()
        self._server: EmbeddedServer | None = None

    @property
    def url(self) -> str:
        """Where it listens; the same after every restart."""
        assert self._server is not None
        return self._server.url

    async def start(self) -> None:
        """The first time on the port that is asked for, or a free one."""
        listening = self._listening
        try:
            self._server = await start_server(
                self._store_folder,
                host=listening.host,
                port=listening.port if self._server is None else self._server.port,
                tls=listening.tls,
                sync_interval=listening.sync_interval,
            )
        except BusError as error:
            raise StartError(str(error)) from error

    async def wait(self) -> int:
        """Until the process ends."""
        assert self._server is not None
        while (code := self._server.exit_code) is None:  # noqa: ASYNC110 (no event to wait for)
            await asyncio.sleep(EXIT_POLL_S)
        return code

    async def stop(self, *, grace_s: float) -> None:
        """`grace_s` is the server's own."""
        if self._server is not None:
            await asyncio.to_thread(self._server.stop)


def has_cuda_device() -> bool:
    """Whether the kernel shows one (torch, which knows better, takes seconds to import)."""
    devices = Path("/dev")
    return any(devices.glob("nvidia[0-9]*")) or (devices / "dxg").exists()


def device_kind(
    configs: Iterable[PipelineConfig], *, timeout_s: float = NVIDIA_SMI_TIMEOUT_S
) -> str:
    """As profiles name it: the GPUs' product name where some pipeline may use GPUs that are there, else
    ``cpu``. Raises `CommandError`."""
    if all(config.device == "cpu" for config in configs):
        return "cpu"
    try:
        gpus = find_gpus(otherwise='set device to "cpu"', timeout_s=timeout_s)
    except ValueError as error:
        raise CommandError(str(error), status=EXIT_BAD_INPUT) from None
    return gpus[0].name if gpus else "cpu"


class EmbeddedSystem:
    """The three processes of one run or daemon, complete when built."""

    def __init__(
        self,
        folder: Path,
        server: Server | None,
        *,
        url: str,
        runs_folder: Path,
        policy: str,
        devices: Devices,
        credentials: Path | None,
        metrics: MetricsAddresses | None,
    ) -> None:
        logs = folder / "logs"
        scheduler_folder, node_folder = str(folder / "scheduler"), str(folder / "node")
        self.url = url
        self._server = server
        known_by = () if credentials is None else ("--credentials", str(credentials))
        profile = folder / PROFILE_FILE
        adopted = ("--profile", str(profile)) if profile.exists() else ()
        self.scheduler = Program(
            "scheduler",
            module="services.scheduler",
            arguments=(
                *("--url", url, "--state-dir", scheduler_folder),
                *("--policy", policy),
                *adopted,
                *known_by,
                *(("--metrics", metrics.scheduler) if metrics else ()),
            ),
            log_path=logs / "scheduler.log",
        )
        self.node = Program(
            "node",
            module="services.node",
            arguments=(
                *("--url", url, "--state-dir", node_folder),
                *("--runs-folder", str(runs_folder)),
                # Among other machines' nodes it needs a name of its own.
                *(("--node", default_name()) if server is None else ()),
                *(("--devices", "cpu") if devices == "cpu" else ()),
                *known_by,
                *(("--metrics", metrics.node) if metrics else ()),
            ),
            log_path=logs / "node.log",
        )
        self._has_node = devices != "none"
        servers = () if server is None else (server,)
        self._children: tuple[Child, ...] = (*servers, *self._programs)

    @property
    def _programs(self) -> tuple[Program, ...]:
        return (self.scheduler, self.node) if self._has_node else (self.scheduler,)

    async def start(self) -> None:
        """All but the server, which runs."""
        for program in self._programs:
            await program.start()

    async def stop(self) -> None:
        """Likewise."""
        await asyncio.gather(*(p.stop(grace_s=PROGRAM_GRACE_S) for p in self._programs))

    async def restart_store(self) -> None:
        """End nats-server; who supervises starts it again, on the same port and store."""
        if self._server is not None:
            await self._server.stop(grace_s=0)

    async def supervise(self, on_notice: Callable[[str], None]) -> None:
        """Restart what ends, until cancelled; raises `GaveUpError`."""
        tasks = [
            asyncio.create_task(keep_alive(child, on_notice=on_notice)) for child in self._children
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def embedded_system(
    folder: Path,
    *,
    runs_folder: Path,
    policy: str,
    devices: Devices,
    listening: Listening | None = None,
    metrics: MetricsAddresses | None = None,
) -> AsyncIterator[EmbeddedSystem]:
    """Start the system under `folder`; stop it at the end, whatever happened, within 5 s. Pipelines
    leave theirs under `runs_folder`. With `devices` ``cpu`` the node has CPU slots though there are
    GPUs, with ``none`` there is no node: others join.
    Unless `listening` says otherwise, nobody but this machine can reach it."""
    listening = listening or Listening()
    async with _servers(folder / "nats", listening) as server:
        url = str(listening.url) if server is None else server.url
        system = EmbeddedSystem(
            folder,
            server,
            url=url,
            runs_folder=runs_folder,
            policy=policy,
            devices=devices,
            credentials=listening.credentials,
            metrics=metrics,
        )
        try:
            await system.start()
            yield system
        finally:
            await system.stop()


@contextlib.asynccontextmanager
async def _servers(store_folder: Path, listening: Listening) -> AsyncIterator[Server | None]:
    """The nats-server; None where there are others, which must answer."""
    if listening.url is not None:
        await _reach(listening.url, listening.credentials)
        yield None
        return
    server = Server(store_folder, listening)
    try:
        await server.start()
    except StartError as error:
        raise CommandError(str(error), status=EXIT_BAD_INPUT) from None
    try:
        yield server
    finally:
        await server.stop(grace_s=0)


async def _reach(url: str, credentials: Path | None) -> None:
    """Ask once, as the scheduler will; it would only be restarted, one time after the other."""
    try:
        known_by = None if credentials is None else read_credentials(credentials, "scheduler")
        bus = await connect(url, name="jigsaw-up", timeout_s=REACH_TIMEOUT_S, credentials=known_by)
    except BusError as error:
        raise CommandError(str(error), status=EXIT_BAD_INPUT) from None
    await bus.close()
