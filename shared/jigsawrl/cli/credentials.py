"""`jigsaw credentials DIR`: who may connect to a nats-server, as files.

Called by `listening`. ``DIR`` holds the authority (``ca.key`` is what must not leak), the server's
certificate, a folder per group with one file per role, and the server's configuration, which lists
every group. Nothing is written over unless ``--renew`` says so.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from jigsawrl.bus.credentials import SUFFIX, header
from jigsawrl.bus.server_config import (
    CLIENT_PORT,
    Route,
    ServerSettings,
    Tls,
    server_config,
    user_of,
)
from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.contract.access import ACCESS
from jigsawrl.contract.streams import check_name

if TYPE_CHECKING:
    from jigsawrl.cli.certificates import Authority

AUTHORITY_DAYS = 3650
"""Its end would be the end of everything that it signed."""

DAYS = 365
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
"""In every server's certificate: whoever is on its machine may connect so."""

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
SERVERS_FILE = "servers.json"
STORE = "store"

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*")


class Servers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the servers are called: ``servers.json``."""

    hosts: tuple[str, ...] = ()
    cluster: tuple[str, ...] = ()
    """The servers of a cluster; empty for a single one."""

    def names(self) -> tuple[str, ...]:
        """For the certificate."""
        return tuple(dict.fromkeys((*LOCAL_HOSTS, *self.hosts, *self.cluster)))


def make(
    folder: Path,
    *,
    group: str,
    days: int = DAYS,
    hosts: Sequence[str] = (),
    cluster: Sequence[str] = (),
    renew: bool = False,
    now: datetime | None = None,
) -> int:
    """Make everything that is missing, or with `renew` again what has an end; the exit status."""
    now = (now or datetime.now(UTC)).replace(microsecond=0)
    servers = _servers(folder, hosts, cluster, renew=renew)
    _check(group, days, [*servers.hosts, *servers.cluster])
    if (folder / group).exists() and not renew:
        raise CommandError(
            f"{folder / group} exists: --renew makes its files again, --group NAME adds another",
            status=EXIT_BAD_INPUT,
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        authority = _authority(folder, now)
        valid_until = min(now + timedelta(days=days), authority.valid_until)
        if renew or not (folder / SERVER_KEY).exists():
            pair = authority.for_server(servers.names(), now=now, valid_until=valid_until)
            _write(folder / SERVERS_FILE, msgspec.json.encode(servers).decode())
            _write(folder / SERVER_CERTIFICATE, pair.certificate)
            _write(folder / SERVER_KEY, pair.key)  # last: without it all three are made again
        named = {group} | (set(groups_of(folder)) if renew else set())
        for name in sorted(named):
            _write_group(folder, name, authority, now=now, valid_until=valid_until)
        configs = _write_configs(folder, servers)
    except OSError as error:
        raise CommandError(
            f"can't write {error.filename or folder}: {error.strerror}", status=EXIT_BAD_INPUT
        ) from None
    _tell(folder, sorted(named), configs, valid_until, servers)
    return 0


def groups_of(folder: Path) -> list[str]:
    """That have credentials there."""
    return sorted(path.parent.name for path in folder.glob(f"*/scheduler{SUFFIX}"))


def server_tls(folder: Path) -> Tls:
    """For a server on this machine; raises `CommandError`."""
    for name in (CA_CERTIFICATE, SERVER_CERTIFICATE, SERVER_KEY):
        if not (folder / name).is_file():
            raise CommandError(
                f"{folder} holds no {name}: give the folder that jigsaw credentials made, or a"
                " group's folder in it",
                status=EXIT_BAD_INPUT,
            )
    folder = folder.resolve()
    return Tls(
        certificate=str(folder / SERVER_CERTIFICATE),
        key=str(folder / SERVER_KEY),
        ca=str(folder / CA_CERTIFICATE),
        groups=tuple(groups_of(folder)),
    )


def _servers(folder: Path, hosts: Sequence[str], cluster: Sequence[str], *, renew: bool) -> Servers:
    path = folder / SERVERS_FILE
    if not path.exists():
        return Servers(tuple(hosts), tuple(cluster))
    try:
        known = msgspec.json.decode(path.read_bytes(), type=Servers)
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(
            f"{path} can't be read ({error}): bring it back, or remove it and give --renew with --hosts"
            " or --cluster",
            status=EXIT_BAD_INPUT,
        ) from None
    if not hosts and not cluster:
        return known
    if not renew:
        raise CommandError(
            f"{folder} has a server's certificate: --hosts and --cluster change it with --renew only",
            status=EXIT_BAD_INPUT,
        )
    return Servers(tuple(hosts) or known.hosts, tuple(cluster) or known.cluster)


def _check(group: str, days: int, hosts: Sequence[str]) -> None:
    try:
        check_name(group, "--group")
    except ValueError as error:
        raise CommandError(str(error), status=EXIT_BAD_INPUT) from None
    if not 1 <= days <= AUTHORITY_DAYS:
        raise CommandError(
            f"--days {days}: give 1 to {AUTHORITY_DAYS}, after which the authority ends",
            status=EXIT_BAD_INPUT,
        )
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise CommandError(
                f"{host!r} is no name and no address of a machine (without a port)",
                status=EXIT_BAD_INPUT,
            )


def _authority(folder: Path, now: datetime) -> Authority:
    from jigsawrl.cli.certificates import Authority, Pair, make_authority

    key, certificate = folder / CA_KEY, folder / CA_CERTIFICATE
    if certificate.exists() and not key.exists():
        raise CommandError(
            f"{key} is missing: nothing can be signed without it; bring it back, or make new"
            " credentials in another folder",
            status=EXIT_BAD_INPUT,
        )
    if key.exists():
        try:
            authority = Authority(Pair(key.read_text(), certificate.read_text()))
        except ValueError as error:
            raise CommandError(f"{key}: {error}", status=EXIT_BAD_INPUT) from None
        if authority.valid_until <= now:
            raise CommandError(
                f"the authority in {folder} has expired: make new credentials in another folder",
                status=EXIT_BAD_INPUT,
            )
        return authority
    authority = make_authority(now=now, valid_until=now + timedelta(days=AUTHORITY_DAYS))
    _write(key, authority.pair.key)
    _write(certificate, authority.pair.certificate)
    return authority


def _write_group(
    folder: Path, group: str, authority: Authority, *, now: datetime, valid_until: datetime
) -> None:
    (folder / group).mkdir(mode=0o700, exist_ok=True)
    for role in ACCESS:
        pair = authority.for_user(user_of(role, group), now=now, valid_until=valid_until)
        _write(
            folder / group / f"{role}{SUFFIX}",
            header(role, group, valid_until)
            + pair.key
            + pair.certificate
            + authority.pair.certificate,
        )


def _write_configs(folder: Path, servers: Servers) -> list[str]:
    tls = Tls(
        certificate=SERVER_CERTIFICATE,
        key=SERVER_KEY,
        ca=CA_CERTIFICATE,
        groups=tuple(groups_of(folder)),
    )
    texts = config_texts(tls, servers.cluster)
    for name, text in texts.items():
        _write(folder / name, text)
    return list(texts)


def config_texts(tls: Tls, cluster: Sequence[str]) -> dict[str, str]:
    """The servers' configurations by file name."""
    listen = f"0.0.0.0:{CLIENT_PORT}"
    single = ServerSettings(
        store_folder=STORE,
        listen=listen,
        tls=tls,
        # Alone it is the only one who knows what it has acknowledged.
        sync_interval=None if cluster else "always",
    )
    if not cluster:
        return {"nats-server.conf": _comment("nats-server.conf") + server_config(single)}
    texts = {}
    for host in cluster:
        name = f"nats-server-{host}.conf"
        others = tuple(other for other in cluster if other != host)
        settings = msgspec.structs.replace(single, route=Route(name=host, others=others))
        texts[name] = _comment(name) + server_config(settings)
    return texts


def _comment(name: str) -> str:
    return (
        "# By jigsaw credentials, which writes it anew when a group comes or is renewed.\n"
        f"# Paths are relative to where the server is started: nats-server -c {name}\n"
    )


def _write(path: Path, text: str) -> None:
    """For the owner's eyes only, and never half."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    part.replace(path)


def _tell(
    folder: Path, named: Sequence[str], configs: Sequence[str], until: datetime, servers: Servers
) -> None:
    """What was made, and where each part goes next."""
    for group in named:
        print(f"group {group}: {folder / group}/ROLE{SUFFIX}, until {until:%Y-%m-%d %H:%M} UTC")
    print(f"servers: valid at {', '.join(servers.names())}")
    if not servers.hosts and not servers.cluster:
        print("         for other machines: --hosts NAME, with --renew where it was made before")
    if servers.cluster:
        shown = ", ".join(str(folder / name) for name in configs)
        print(f"         start each with nats-server -c FILE: {shown}")
    else:
        print(f"         start one with jigsaw up --listen HOST:4222 --credentials {folder}")
    print(
        "         one that runs takes this up at nats-server --signal reload, or jigsaw down and up"
    )
    print(f"authority: keep {folder / CA_KEY} where nobody else reads it")
