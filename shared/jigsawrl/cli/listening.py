"""Options that say where a daemon listens and to whom, and the command `credentials`.

Called by `cluster_commands`; like there, what does the work is imported only when it is needed.
"""

from __future__ import annotations

import argparse
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError

if TYPE_CHECKING:
    from jigsawrl.cli.embedded import Listening

SYNC = re.compile(r"always|[1-9][0-9]*(ms|s|m|h)")

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s]+)(?::([0-9]{1,5}))?")


def add_options(up: argparse.ArgumentParser) -> None:
    """Of `jigsaw up`."""
    up.add_argument(
        "--url",
        metavar="A,B,C",
        help="NATS servers that are there already; by default one is started",
    )
    up.add_argument(
        "--listen",
        metavar="HOST[:PORT]",
        help="an address beyond this machine takes --credentials; default: 127.0.0.1, any free port",
    )
    up.add_argument(
        "--credentials",
        type=Path,
        metavar="DIR",
        help="by `jigsaw credentials`, or a group's folder in it: TLS, and who may do what",
    )
    up.add_argument(
        "--sync-interval",
        metavar="TIME",
        help="how soon the store is on the disk: always (before a message is acknowledged; default),"
        " or for example 10s",
    )


def as_options(arguments: argparse.Namespace) -> list[str]:
    """The same for a process in the background."""
    given = {
        "--url": arguments.url,
        "--listen": arguments.listen,
        "--sync-interval": arguments.sync_interval,
    }
    options = [part for name, value in given.items() if value for part in (name, value)]
    if arguments.credentials is not None:
        options += ["--credentials", str(arguments.credentials.resolve())]
    return options


def of(arguments: argparse.Namespace) -> Listening:
    """What they mean; raises `CommandError`."""
    from jigsawrl.bus.server import is_loopback
    from jigsawrl.cli.credentials import server_tls
    from jigsawrl.cli.embedded import Listening

    if arguments.url is not None:
        return _there_already(arguments)
    host, port = _host_and_port(arguments.listen or "127.0.0.1")
    sync_interval = arguments.sync_interval or "always"
    if not SYNC.fullmatch(sync_interval):
        raise CommandError(
            f"--sync-interval {sync_interval}: give always, or a time such as 10s",
            status=EXIT_BAD_INPUT,
        )
    if arguments.credentials is None:
        if not is_loopback(host):
            raise CommandError(
                f"--listen {arguments.listen}: others can reach that address, which takes TLS and"
                " credentials: make them with jigsaw credentials DIR, and give --credentials DIR",
                status=EXIT_BAD_INPUT,
            )
        return Listening(host=host, port=port, sync_interval=sync_interval)
    group = _group_folder(arguments.credentials.resolve())
    tls = server_tls(group.parent)
    _check_credentials(group)
    return Listening(
        host=host,
        port=port,
        tls=tls,
        credentials=group,
        sync_interval=sync_interval,
    )


def _there_already(arguments: argparse.Namespace) -> Listening:
    from jigsawrl.cli.embedded import Listening

    for option, value in (
        ("--listen", arguments.listen),
        ("--sync-interval", arguments.sync_interval),
    ):
        if value is not None:
            raise CommandError(
                f"{option} has no effect with --url: it is said where those servers are started",
                status=EXIT_BAD_INPUT,
            )
    if arguments.credentials is None:
        return Listening(url=arguments.url)
    group = _group_folder(arguments.credentials.resolve())
    _check_credentials(group)
    return Listening(url=arguments.url, credentials=group)


def _check_credentials(group: Path) -> None:
    """Those that the daemon's programs will use: they would only be restarted, one after the other."""
    from jigsawrl.bus.base import BusError
    from jigsawrl.bus.credentials import expiry, read_credentials

    for role in ("scheduler", "node"):
        try:
            problem = expiry(read_credentials(group, role), datetime.now(UTC))
        except BusError as error:
            problem = str(error)
        if problem is not None:
            raise CommandError(f"--credentials: {problem}", status=EXIT_BAD_INPUT)


def _host_and_port(text: str) -> tuple[str, int | None]:
    found = _ADDRESS.fullmatch(text)
    port = None if found is None or found[2] is None else int(found[2])
    if found is None or (port is not None and not 1 <= port <= 65535):
        raise CommandError(
            f"--listen {text}: give HOST or HOST:PORT, for example 0.0.0.0:4222",
            status=EXIT_BAD_INPUT,
        )
    return found[1].strip("[]"), port


def _group_folder(path: Path) -> Path:
    """`path`, or the only group in it."""
    from jigsawrl.cli.credentials import SERVER_KEY, groups_of

    if not (path / SERVER_KEY).exists():
        return path
    groups = groups_of(path)
    if len(groups) != 1:
        raise CommandError(
            f"--credentials {path}: its groups are {', '.join(groups) or 'none'}; give"
            f" {path}/GROUP, whose scheduler this is",
            status=EXIT_BAD_INPUT,
        )
    return path / groups[0]


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Of `jigsaw credentials`."""
    parser = commands.add_parser(
        "credentials", help="make certificates for a NATS server, and for who may use it"
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="made, or added to")
    parser.add_argument(
        "--group", default="default", metavar="NAME", help="who share pipelines; default: default"
    )
    parser.add_argument("--days", type=int, metavar="N", help="until they expire; default: 365")
    parser.add_argument(
        "--hosts", type=_names, default=(), metavar="A,B", help="by which the server is reached"
    )
    parser.add_argument(
        "--cluster", type=_names, default=(), metavar="A,B,C", help="hosts of its three servers"
    )
    parser.add_argument(
        "--renew", action="store_true", help="make those that exist again, all with a new end"
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def make_credentials(arguments: argparse.Namespace) -> int:
    """Carry it out."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise CommandError("cryptography is not installed: pip install 'jigsawrl[cli]'") from None
    from jigsawrl.cli.credentials import DAYS, make

    if arguments.cluster and len(arguments.cluster) not in (3, 5):
        raise CommandError(
            f"--cluster {','.join(arguments.cluster)}: a cluster is three servers, or five",
            status=EXIT_BAD_INPUT,
        )
    return make(
        arguments.folder,
        group=arguments.group,
        days=DAYS if arguments.days is None else arguments.days,
        hosts=arguments.hosts,
        cluster=arguments.cluster,
        renew=arguments.renew,
    )
