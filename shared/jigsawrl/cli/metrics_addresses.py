"""Where services serve their metrics: a daemon's scheduler at the port that is asked for, its node at
the next one; a node that joins at its own. Asked of `jigsaw run`, `up` and `node`, which refuse what
can't work before anything is started."""

from __future__ import annotations

import socket
from typing import NamedTuple

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.metrics import DEFAULT_ADDRESS, format_address, parse_address


class MetricsAddresses(NamedTuple):
    """As the services' ``--metrics`` takes them."""

    scheduler: str
    node: str

    def told(self) -> str:
        """A line for people."""
        return f"metrics: scheduler at {self.scheduler}, node at {self.node} (see their logs)"


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


def node_metrics_address(wanted: str | None) -> str | None:
    """For the ``--metrics`` of a machine that joins (empty: the port that a daemon's node has); raises
    `CommandError` as above."""
    if wanted is None:
        return None
    try:
        if wanted:
            host, port = parse_address(wanted)
        else:
            host, port = parse_address(DEFAULT_ADDRESS)
            port += 1
        _check_free(host, port)
    except ValueError as error:
        raise CommandError(f"--metrics {error}", status=EXIT_BAD_INPUT) from None
    return format_address(host, port)


def _check_free(host: str, port: int) -> None:
    try:
        family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"{format_address(host, port)}: {reason}") from None
