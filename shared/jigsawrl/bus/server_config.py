"""The configuration file of a nats-server: alone or in a cluster, plain or with TLS and roles.

Pure: settings in, text out. Used by `server` for the embedded one and by `jigsaw credentials` for those
that somebody else starts. With credentials every connection is mutual TLS, a certificate is its user
(``role@group``), each group is an account of its own, and a role may do what `permissions` lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import msgspec

from jigsawrl.bus.permissions import permissions
from jigsawrl.contract.access import ACCESS, ServiceRole
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES, Subjects

CLIENT_PORT = 4222
ROUTE_PORT = 6222

SERVER_USER = "server@nats"
"""In the servers' own certificate: only who has it may join a cluster."""

TLS_TIMEOUT_S = 5
"""For a handshake; a busy machine needs more than the server's own 2 s."""

GREETING_AFTER = "1s"
"""So long the server waits for a client that begins with TLS, before it greets in plain text, which
would look to that client as if there were no TLS. Its own 50 ms (``auto``) are less than the round
trip of a far link, or the pause of a busy machine; nats-py waits for a greeting for two seconds."""


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """Files of a server, and the groups that it serves."""

    certificate: str
    key: str
    ca: str
    groups: tuple[str, ...]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A server's place in a cluster."""

    name: str
    others: tuple[str, ...]
    """Hosts of the other servers."""
    listen: str = f"0.0.0.0:{ROUTE_PORT}"
    urls: tuple[str, ...] = ()
    """Of the others; default: their hosts and the usual port."""


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a configuration file says."""

    store_folder: str
    listen: str | None = None
    """``HOST:PORT``; None where the command line says it."""
    max_store_bytes: int | None = None
    sync_interval: str | None = None
    """``always``: a message is on the disk before it is acknowledged. None: the server's own two
    minutes, within which a machine that loses its power loses what it acknowledged."""
    tls: Tls | None = None
    route: Route | None = None


def user_of(role: str, group: str) -> str:
    """A certificate's name, and the server's user."""
    return f"{role}@{group}"


def server_config(settings: ServerSettings, subjects: Subjects | None = None) -> str:
    """The text of the file."""
    lines = []
    if settings.route is not None:
        lines.append(f"server_name: {_quoted(settings.route.name)}")
    if settings.listen is not None:
        lines.append(f"listen: {_quoted(settings.listen)}")
    lines += [f"max_payload: {MAX_PAYLOAD_BYTES}", f"max_pending: {64 * MAX_PAYLOAD_BYTES}"]
    lines += _block("jetstream", _store(settings))
    if settings.tls is not None:
        # Our clients begin with the handshake, so that nobody between can talk them out of it; others
        # may wait for the server's greeting.
        first = f"handshake_first: {_quoted(GREETING_AFTER)}"
        lines += _block("tls", [*_tls(settings.tls), first])
        lines += _accounts(settings.tls.groups, subjects or Subjects())
    if settings.route is not None:
        lines += _block("cluster", _cluster(settings.route, settings.tls))
    return "\n".join(lines) + "\n"


def _store(settings: ServerSettings) -> list[str]:
    lines = [f"store_dir: {_quoted(settings.store_folder)}"]
    if settings.max_store_bytes is not None:
        lines.append(f"max_file_store: {settings.max_store_bytes}")
    if settings.sync_interval is not None:
        lines.append(f"sync_interval: {_quoted(settings.sync_interval)}")
    return lines


def _tls(tls: Tls) -> list[str]:
    return [
        f"cert_file: {_quoted(tls.certificate)}",
        f"key_file: {_quoted(tls.key)}",
        f"ca_file: {_quoted(tls.ca)}",
        "verify_and_map: true",
        'min_version: "1.3"',
        f"timeout: {TLS_TIMEOUT_S}",
    ]


def _cluster(route: Route, tls: Tls | None) -> list[str]:
    scheme = "nats" if tls is None else "tls"
    urls = route.urls or tuple(f"{scheme}://{host}:{ROUTE_PORT}" for host in route.others)
    lines = ["name: jigsaw", f"listen: {_quoted(route.listen)}"]
    lines += [f"routes: [{', '.join(map(_quoted, urls))}]"]
    if tls is not None:
        # A role's certificate is of the same authority, but is no server's.
        lines += _block("authorization", [f"user: {_quoted(SERVER_USER)}"])
        lines += _block("tls", _tls(tls))
    return lines


def _accounts(groups: Sequence[str], subjects: Subjects) -> list[str]:
    lines: list[str] = []
    for group in groups:
        users: list[str] = []
        for role in ACCESS:
            users += _user(role, group, subjects)
        lines += _block(_quoted(group), ["jetstream: enabled", "users: [", *_indented(users), "]"])
    return _block("accounts", lines)


def _user(role: ServiceRole, group: str, subjects: Subjects) -> list[str]:
    allowed = permissions(role, subjects)
    publish = _patterns("allow", allowed.publish)
    if allowed.deny_publish:
        publish += _patterns("deny", allowed.deny_publish)
    rights = _block("publish", publish) + _block("subscribe", _patterns("allow", allowed.subscribe))
    user = [f"user: {_quoted(user_of(role, group))}", *_block("permissions", rights)]
    return ["{", *_indented(user), "}"]


def _patterns(name: str, patterns: Iterable[str]) -> list[str]:
    return [f"{name}: [", *_indented(_quoted(pattern) for pattern in patterns), "]"]


def _block(name: str, lines: Iterable[str]) -> list[str]:
    return [f"{name} {{", *_indented(lines), "}"]


def _indented(lines: Iterable[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _quoted(text: str) -> str:
    return json.dumps(text)
