"""Credentials on this machine: who may read their private keys, and when they end."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from jigsawrl.bus.base import BusError
from jigsawrl.bus.credentials import (
    SUFFIX,
    WARNING,
    expiry,
    open_to_others,
    read_credentials,
)
from jigsawrl.bus.credentials import warning as near_end
from jigsawrl.cli.checks.finding import Finding, failed, ok, warning
from jigsawrl.cli.credentials import CA_KEY, SERVER_CERTIFICATE, SERVER_KEY, groups_of
from jigsawrl.contract.access import ACCESS

RENEW = "renew them with jigsaw credentials --renew"


def check_credentials(path: Path, *, now: datetime | None = None) -> Iterator[Finding]:
    """Of a role's file, or of all roles of a group's folder, and of the server's beside that."""
    now = now or datetime.now(UTC)
    groups = groups_of(path) if path.is_dir() else []
    if len(groups) == 1:  # it may be left out
        path = path / groups[0]
    if path.is_dir():
        roles: dict[str, Path] = {
            role: file for role in ACCESS if (file := path / f"{role}{SUFFIX}").exists()
        }
    else:
        roles = {"client": path}
    found = [finding for role, file in roles.items() for finding in _of_role(role, file, now)]
    if path.is_dir():
        keys = [file for name in (CA_KEY, SERVER_KEY) if (file := path.parent / name).exists()]
        found += [finding for file in keys for finding in _of_key(file)]
        found += _of_server(path.parent / SERVER_CERTIFICATE, now)
    if not roles:
        found.append(failed("credentials", f"{path} holds none", remedy=RENEW))
    yield from found or [ok("credentials", f"{path}: for their owner's eyes only, and valid")]


def _of_role(role: str, path: Path, now: datetime) -> Iterator[Finding]:
    try:
        credentials = read_credentials(path, role)
    except BusError as error:
        yield failed("credentials", str(error), remedy=RENEW)
        return
    yield from _of_key(path)
    expired, near = expiry(credentials, now), near_end(credentials, now)
    if expired is not None:
        yield failed("credentials", expired, remedy=RENEW)
    elif near is not None:
        yield warning("credentials", near, remedy=RENEW)


def _of_key(path: Path) -> Iterator[Finding]:
    problem = open_to_others(path)
    if problem is not None:
        yield warning("credentials", problem, remedy="make new ones if somebody has read it")


def _of_server(path: Path, now: datetime) -> Iterator[Finding]:
    try:
        from jigsawrl.cli.certificates import valid_until
    except ImportError:  # it comes with the extra cli
        return
    try:
        until = valid_until(path.read_text())
    except FileNotFoundError:  # another machine has it
        return
    except (OSError, ValueError) as error:
        yield failed("credentials", f"{path} can't be read ({error})", remedy=RENEW)
        return
    if until <= now:
        yield failed(
            "credentials", f"{path} has expired at {until:%Y-%m-%d %H:%M} UTC", remedy=RENEW
        )
    elif until - now <= WARNING:
        yield warning("credentials", f"{path} expires in {(until - now).days} days", remedy=RENEW)
