"""``python -m services.scheduler --url URL --state-dir DIR``: leads, or stands by."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from jigsawrl.bus.base import Bus
from jigsawrl.bus.client import connect
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.core.policies import DEFAULT_POLICY, POLICIES
from jigsawrl.observe import configure_logging
from jigsawrl.profile_file import read_profile
from services.credentials import add_credentials, credentials_of
from services.exposition import add_metrics, serve_metrics
from services.scheduler.leader import DeposedError, Leader
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.watching import Watch
from services.stopping import run_program, until_told_to_stop

if TYPE_CHECKING:
    from services.scheduler.spans import SpanWatch

log = structlog.get_logger()

LEASE = "scheduler"
STANDBY_S = 1.0
"""How often a standby tries, and a leader renews: the lease's end sends no event."""

HANDOVER_S = 2.0
"""For the last snapshot of one that is told to stop; nested in `STOP_DEADLINE_S`."""

SPANS_CLOSE_S = 0.5
"""For the last spans of a process that ends: who collects them may be gone."""

SPAN_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def main() -> None:
    """Run one scheduler process."""
    arguments = argparse.ArgumentParser(prog="python -m services.scheduler")
    arguments.add_argument("--url", required=True, help="NATS server, nats://127.0.0.1:4222")
    arguments.add_argument(
        "--state-dir", required=True, type=Path, help="for segment files and snapshots"
    )
    add_metrics(arguments)
    arguments.add_argument("--prefix", default="jig", help="first token of all subjects")
    arguments.add_argument("--policy", default=DEFAULT_POLICY, choices=sorted(POLICIES))
    arguments.add_argument(
        "--profile", type=Path, metavar="FILE", help="of the devices, by `jigsaw profile`"
    )
    add_credentials(arguments)
    options = arguments.parse_args()
    configure_logging(service="scheduler")
    sys.exit(run_program(_main(options)))


async def _main(options: argparse.Namespace) -> int:
    profile = None
    if options.profile is not None:
        try:
            profile = read_profile(options.profile, device_kind=None)
        except ValueError as error:
            print(f"services.scheduler: --profile {error}", file=sys.stderr)
            return 2
    holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    bus = await connect(
        options.url,
        name=f"scheduler {holder}",
        prefix=options.prefix,
        credentials=credentials_of(options, "scheduler"),
    )
    try:
        await _serve(bus, holder, options, profile)
    finally:
        await bus.close()
    return 0


async def _serve(
    bus: Bus, holder: str, options: argparse.Namespace, profile: DeviceProfile | None
) -> None:
    """Live, with those who look on."""
    metrics = SchedulerMetrics(bus, host=socket.gethostname(), folder=options.state_dir)
    watches: list[Watch] = [] if options.metrics is None else [metrics]
    spans = _span_watch()
    watches += [] if spans is None else [spans]
    try:
        async with serve_metrics(options.metrics, metrics.gather):
            await until_told_to_stop(_live(bus, holder, options, profile, watches))
    finally:
        if spans is not None:
            closing = threading.Thread(target=spans.close, daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, SPANS_CLOSE_S)


def _span_watch() -> SpanWatch | None:
    """Where OpenTelemetry is told where to send spans. A package that is missing ends nothing."""
    if not any(os.environ.get(name) for name in SPAN_VARIABLES):
        return None
    try:
        from services.scheduler.spans import SpanWatch
    except ImportError as error:
        log.warning("exports no spans", reason=f"{error}: pip install jigsawrl[otel]")
        return None
    return SpanWatch()


async def _live(
    bus: Bus,
    holder: str,
    options: argparse.Namespace,
    profile: DeviceProfile | None,
    watches: Sequence[Watch],
) -> None:
    await bus.create_streams(bus.subjects.cluster_streams())
    while True:
        revision = await bus.acquire_lease(LEASE, holder)
        if revision is None:
            await asyncio.sleep(STANDBY_S)
            continue
        leader = Leader(
            bus,
            holder=holder,
            folder=options.state_dir,
            policy=options.policy,
            profile=profile,
            watches=watches,
        )
        await _lead(bus, leader, _Lease(bus, holder, revision))
        log.warning("was deposed and stands by")
        await asyncio.sleep(STANDBY_S)


async def _lead(bus: Bus, leader: Leader, lease: _Lease) -> None:
    """Until the lease is lost or another's election is read; told to stop, it hands over first."""
    leading = asyncio.ensure_future(leader.lead())
    renewing = asyncio.ensure_future(lease.keep())
    try:
        await asyncio.wait([leading, renewing], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        leader.stop()
        await asyncio.wait(
            [leading, renewing], timeout=HANDOVER_S, return_when=asyncio.FIRST_COMPLETED
        )
        raise
    finally:
        for task in (leading, renewing):
            task.cancel()
        results = await asyncio.gather(leading, renewing, return_exceptions=True)
        await bus.release_lease(LEASE, lease.revision)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, DeposedError):
            raise result


class _Lease:
    """Renewed until lost."""

    def __init__(self, bus: Bus, holder: str, revision: int) -> None:
        self._bus = bus
        self._holder = holder
        self.revision = revision

    async def keep(self) -> None:
        """Returns when it is lost."""
        while True:
            await asyncio.sleep(STANDBY_S)
            revision = await self._bus.renew_lease(LEASE, self._holder, self.revision)
            if revision is None:
                return
            self.revision = revision


if __name__ == "__main__":
    main()
