"""``python -m services.node --url URL --state-dir DIR --runs-folder DIR``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import uuid
from pathlib import Path

from jigsawrl.bus.base import Bus
from jigsawrl.bus.client import connect
from jigsawrl.contract.message import Worker
from jigsawrl.contract.streams import check_name
from jigsawrl.devices.cpu import CpuActuator
from jigsawrl.devices.undivided import UndividedActuator
from jigsawrl.observe import configure_logging
from services.credentials import add_credentials, credentials_of
from services.exposition import add_metrics, serve_metrics
from services.node.devices import discover
from services.node.metrics import NodeMetrics, TenantFiles, empty_folder
from services.node.node import Node
from services.node.runs import folder_id
from services.run import CONNECT_TIMEOUT_S
from services.stopping import run_program, until_told_to_stop
from services.tenant_metrics import FOLDER_VARIABLE

STOP_DEADLINE_S = 4.8
"""Longer than a tenant is given between SIGTERM and SIGKILL."""
GOODBYE_DEADLINE_S = 4.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m services.node")
    parser.add_argument("--url", required=True, help="NATS server, nats://127.0.0.1:4222")
    parser.add_argument("--state-dir", required=True, type=Path, help="logs and the process list")
    parser.add_argument(
        "--runs-folder", required=True, type=Path, help="trainers write into DIR/<pipeline>"
    )
    add_metrics(parser)
    parser.add_argument("--node", default="node0", help="this node's name")
    parser.add_argument("--devices", help="choice of devices: cpu, or for example cpu:0,cpu:1")
    parser.add_argument("--prefix", default="jig", help="first token of all subjects")
    parser.add_argument(
        "--notice",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="from SIGTERM on, to hand over what is here; default: none",
    )
    add_credentials(parser)
    return parser


def main() -> int:
    """Run a node until SIGTERM or SIGINT."""
    arguments = _parser().parse_args()
    configure_logging(service="node", worker=arguments.node)
    try:
        check_name(arguments.node, "--node")
        devices = discover(arguments.node, arguments.devices)
        folder_id(arguments.runs_folder)
        arguments.state_dir.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"{error.filename} can't be written: {error.strerror}", file=sys.stderr)
        return 2
    identity = Worker(id=arguments.node, boot=uuid.uuid4().hex[:12])

    async def serve() -> int:
        credentials = credentials_of(arguments, "node")
        bus = await connect(
            arguments.url,
            name=arguments.node,
            prefix=arguments.prefix,
            timeout_s=CONNECT_TIMEOUT_S,
            credentials=credentials,
        )
        node = Node(
            bus,
            identity,
            devices,
            actuators={"cpu": CpuActuator(), "cuda": UndividedActuator("cuda")},
            tenant_environment=_counting(arguments),
            url=arguments.url,
            state_folder=arguments.state_dir,
            runs_folder=arguments.runs_folder,
            credentials_folder=None if credentials is None else credentials.path.parent.resolve(),
            notice_s=arguments.notice,
        )
        try:
            async with _metrics(arguments, bus, node):
                await until_told_to_stop(
                    node.live(),
                    deadline_s=STOP_DEADLINE_S,
                    take_leave=node.take_leave if arguments.notice > 0 else None,
                )
        finally:
            # Tenants are stopped even where the bus is away: the goodbye alone has a deadline.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(node.stop("told to stop"), GOODBYE_DEADLINE_S)
            await bus.close()
        return 0 if node.sent_away is None else 1

    return run_program(serve())


def _counting(arguments: argparse.Namespace) -> dict[str, str]:
    """What tenants are told, who count only where somebody may ask."""
    if arguments.metrics is None:
        return {}
    return {FOLDER_VARIABLE: str(empty_folder(_counted(arguments)))}


def _counted(arguments: argparse.Namespace) -> Path:
    folder: Path = arguments.state_dir
    return folder.resolve() / "metrics"


def _metrics(
    arguments: argparse.Namespace, bus: Bus, node: Node
) -> contextlib.AbstractAsyncContextManager[str | None]:
    metrics = NodeMetrics(
        arguments.node,
        node.running,
        health=lambda: bus.health,
        places={"node": arguments.state_dir, "runs": arguments.runs_folder},
    )
    return serve_metrics(arguments.metrics, metrics.gather, TenantFiles(_counted(arguments)))


if __name__ == "__main__":
    sys.exit(main())
