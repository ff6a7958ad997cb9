"""Who this process is to a nats-server: one file per role, and what it means when it is refused.

Used by `opening`; made by `jigsaw credentials`. A file is a line for people, the private key, the
certificate and that of the authority which also signed the server's. Reading it takes the standard
library only.
"""

from __future__ import annotations

import re
import ssl
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec

from jigsawrl.bus.base import BusError

ENVIRONMENT = "JIGSAW_CREDENTIALS"
"""Of a process that is given no ``--credentials``."""

SUFFIX = ".pem"

_HEADER = re.compile(r"^# JigsawRL credentials: (\S+)@(\S+) until (\S+)$", re.MULTILINE)
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\n?", re.DOTALL)

WARNING = timedelta(days=14)
"""Before the end each connection is worth a line: enough for a holiday."""

MAKE = "make them with jigsaw credentials"


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Of one role in one group."""

    path: Path
    role: str
    group: str
    valid_until: datetime

    def __str__(self) -> str:
        return f"role {self.role} of group {self.group}"

    def tls_context(self) -> ssl.SSLContext:
        """Read anew for every connection, since files are renewed. Raises `BusError`."""
        try:
            authority = _CERTIFICATE.findall(self.path.read_text())[-1]
            context = ssl.create_default_context(cadata=authority)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(self.path)
        except (OSError, ValueError, IndexError) as error:  # ssl.SSLError is an OSError
            raise BusError(
                f"the credentials {self.path} can't be used ({error}): {MAKE}"
            ) from error
        return context


def header(role: str, group: str, valid_until: datetime) -> str:
    """The line for people, which is also how a program knows who it is."""
    return f"# JigsawRL credentials: {role}@{group} until {valid_until:%Y-%m-%dT%H:%M:%SZ}\n"


def read_credentials(path: Path, role: str) -> Credentials:
    """Those of `role`, in the file `path` or in the folder `path`. Raises `BusError`."""
    path = _file_of(path, role)
    try:
        found = _HEADER.search(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise BusError(f"the credentials {path} can't be read ({error}): {MAKE}") from None
    if found is None:
        raise BusError(f"{path} holds no credentials of a role: {MAKE}")
    try:
        valid_until = datetime.strptime(found[3], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    except ValueError:
        raise BusError(f"{path}: {found[3]!r} is no time: {MAKE}") from None
    if found[1] != role:
        raise BusError(
            f"{path} is for the role {found[1]}, and this is {role}: give"
            f" {path.with_name(role)}{SUFFIX}"
        )
    return Credentials(path=path, role=found[1], group=found[2], valid_until=valid_until)


def _file_of(path: Path, role: str) -> Path:
    """In a folder that holds one group, the group may be left out."""
    if not path.is_dir():
        return path
    if not (path / "server.pem").exists():
        return path / f"{role}{SUFFIX}"
    groups = sorted(below.parent.name for below in path.glob(f"*/{role}{SUFFIX}"))
    if len(groups) == 1:
        return path / groups[0] / f"{role}{SUFFIX}"
    if not groups:
        raise BusError(f"{path} holds no credentials of role {role}: {MAKE}")
    raise BusError(f"{path} holds several groups: name one of {path}/{{{','.join(groups)}}}")


def expiry(credentials: Credentials, now: datetime) -> str | None:
    """Why these can't be used any more, as one line."""
    if now < credentials.valid_until:
        return None
    return (
        f"the credentials {credentials.path} ({credentials}) have expired at"
        f" {credentials.valid_until:%Y-%m-%d %H:%M} UTC: {MAKE} --renew"
    )


def open_to_others(path: Path) -> str | None:
    """That a file with a private key is not for its owner's eyes only, as one line."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if not mode & 0o077:
        return None
    return f"{path} holds a private key and is open to others (mode {mode:o}): chmod 600 {path}"


def warning(credentials: Credentials, now: datetime) -> str | None:
    """That their end is near, as one line."""
    left = credentials.valid_until - now
    if left > WARNING:
        return None
    return (
        f"the credentials {credentials.path} ({credentials}) expire in {left.days} days: {MAKE} --renew"
        " before"
    )


EXPIRED, NOT_YET_VALID, WRONG_HOST, WRONG_ADDRESS = 10, 9, 62, 64
"""OpenSSL's numbers for what is wrong with a server's certificate."""


def refusal(error: BaseException, *, url: str, credentials: Credentials | None) -> str | None:
    """One line for people where trying again is of no use: who refuses whom, why, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        if credentials is None:
            return _asks_for_credentials(url)
        return _bad_server(error, url, credentials)
    if isinstance(error, ssl.SSLError):
        return _bad_client(error, url, credentials)
    if "authorization violation" in str(error).lower() or "authorization failed" in str(error):
        if credentials is None:
            return _asks_for_credentials(url)
        return (
            f"NATS at {url} knows no {credentials}: add the group to the server's configuration"
            " (jigsaw credentials says how) and let it read that again"
        )
    return None


def _asks_for_credentials(url: str) -> str:
    return (
        f"NATS at {url} takes TLS with a client certificate only: give the role's file with"
        f" --credentials, or in ${ENVIRONMENT}"
    )


def _bad_server(error: ssl.SSLCertVerificationError, url: str, credentials: Credentials) -> str:
    if error.verify_code in (EXPIRED, NOT_YET_VALID):
        return (
            f"the certificate of NATS at {url} has expired or is not valid yet: renew it with"
            " jigsaw credentials --renew, and let the server read it again"
        )
    if error.verify_code in (WRONG_HOST, WRONG_ADDRESS):
        return (
            f"the certificate of NATS at {url} is for other hosts ({error.verify_message}): connect by"
            " one of its names, or renew it with jigsaw credentials --renew --hosts"
        )
    return (
        f"the certificate of NATS at {url} is not by the authority in {credentials.path}"
        f" ({error.verify_message}): use credentials that were made with the server's"
    )


def _bad_client(error: ssl.SSLError, url: str, credentials: Credentials | None) -> str | None:
    """What the server's alert says of our certificate."""
    reason = (error.reason or str(error)).upper()
    if "WRONG_VERSION_NUMBER" in reason or "RECORD_LAYER_FAILURE" in reason:
        return (
            f"what listens at {url} speaks no TLS: give no --credentials to a plain server, or start"
            " it with TLS"
        )
    if credentials is None:
        return _asks_for_credentials(url) if "ALERT" in reason or "CERT" in reason else None
    if "EXPIRED" in reason:
        return (
            f"NATS at {url} says that the certificate in {credentials.path} ({credentials}) has"
            f" expired: {MAKE} --renew"
        )
    if "UNKNOWN_CA" in reason or "BAD_CERTIFICATE" in reason or "CERTIFICATE_UNKNOWN" in reason:
        return (
            f"NATS at {url} does not know the authority of {credentials.path} ({credentials}): use"
            " credentials that were made with the server's"
        )
    if "PROTOCOL_VERSION" in reason:
        return f"NATS at {url} speaks no TLS 1.3: set min_version and update the server"
    return None
