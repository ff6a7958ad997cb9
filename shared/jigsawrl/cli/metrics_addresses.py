"""Where a daemon's services serve their metrics: the scheduler at the port that is asked for, the node
at the next one. Asked of `jigsaw up`, which refuses what can't work before anything is started."""

from __future__ import annotations

import socket
from typing import NamedTuple

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.metrics import DEFAULT_ADDRESS, format_address, parse_address


class MetricsAddresses(NamedTuple):
    """As the services' ``--metrics`` takes them."""

    scheduler: str
    node: str


def metrics_addresses(wanted: str | None) -> MetricsAddresses | None:
    """For ``--metrics`` (empty: the default address); raises `CommandError` for an address that is
    none, or is taken."""
    if wanted is None:
        return None
    try:
        host, port = parse_address(wanted or DEFAULT_ADDRESS)
        ports = (port, port + 1 if port else 0)
        if ports[1] > 65535:
            raise ValueError(f"{wanted}: the node's port would be {ports[1]}")
        for one in ports:
            _check_free(host, one)
    except ValueError as error:
        raise CommandError(f"--metrics {error}", status=EXIT_BAD_INPUT) from None
    return MetricsAddresses(*(format_address(host, one) for one in ports))


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{format_address(host, port)}: {reason}") from None
