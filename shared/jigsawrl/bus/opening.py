"""Opens one nats-py client: TLS first where there are credentials, and no waiting for who refuses us.

Used by `connection`. nats-py tries for ever whatever the reason is, and tells it its error callback
alone; here a refusal ends the try, and its reason is the error.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from nats.aio.client import Client

from jigsawrl.bus.base import BusError
from jigsawrl.bus.credentials import (
    Credentials,
    expiry,
    open_to_others,
    read_credentials,
    refusal,
    warning,
)
from jigsawrl.bus.denials import Denials, GuardedClient
from jigsawrl.bus.permissions import inbox_of

log = logging.getLogger("jigsawrl.bus")

PENDING_BYTES = 32 * 1024 * 1024
"""What nats-py may buffer while it reconnects; publishers wait for the connection, so little does."""

CLOSE_TIMEOUT_S = 2.0
"""For each of the two parts of a close (flush, disconnect); together under 5 s."""

OPTIONS: dict[str, Any] = {
    "allow_reconnect": True,
    "connect_timeout": 2,
    "reconnect_time_wait": 0.1,
    "max_reconnect_attempts": -1,
    "ping_interval": 5,
    "max_outstanding_pings": 2,
    "drain_timeout": 3,
    "pending_size": PENDING_BYTES,
}


class _WithoutEndOfTls(logging.Filter):
    """Drops a warning of asyncio for every TLS connection that the other side closes: nats-py's stream
    was made before the handshake, and does not know that there is TLS below it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("returning true from eof_received()")


logging.getLogger("asyncio").addFilter(_WithoutEndOfTls())

ErrorHandler = Callable[[Exception], Awaitable[None]]
Handler = Callable[[], Awaitable[None]]


class RefusedError(BusError):
    """The server does not take us, or we do not take it: trying again changes nothing until somebody
    has done something."""


async def open_client(
    url: str,
    *,
    name: str,
    credentials: Credentials | None,
    denials: Denials,
    on_error: ErrorHandler,
    on_reconnected: Handler,
    on_closed: Handler,
) -> Client:
    """A connected client of one of the servers at `url` (commas between several). Waits for a server
    that is away; raises `RefusedError`."""
    if credentials is not None:  # files are renewed
        credentials = read_credentials(credentials.path, credentials.role)
        now = datetime.now(UTC)
        expired = expiry(credentials, now)
        if expired is not None:
            raise RefusedError(expired)
        for line in (warning(credentials, now), open_to_others(credentials.path)):
            if line is not None:
                log.warning("%s", line)
    client = GuardedClient(denials)
    refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def on_any_error(error: Exception) -> None:
        reason = refusal(error, url=url, credentials=credentials)
        if reason is not None and not refused.done():
            refused.set_result(reason)
        await on_error(error)

    connecting = asyncio.ensure_future(
        client.connect(
            url.split(","),
            name=name,
            error_cb=on_any_error,
            reconnected_cb=on_reconnected,
            closed_cb=on_closed,
            **OPTIONS,
            **_identity(credentials),
        )
    )
    try:
        waited: list[asyncio.Future[Any]] = [connecting, refused]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            raise RefusedError(refused.result())
        connecting.result()
    except BaseException:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await discard(client)
        raise
    return client


def check_url(url: str) -> None:
    """Raises `RefusedError` for what nats-py does not take as addresses, or takes otherwise than it is
    meant. It would end in a traceback there, or in no answer."""
    for address in url.split(","):
        try:
            parsed = urlsplit(address if "://" in address else f"nats://{address}")
            is_sound = parsed.scheme in ("nats", "tls") and bool(parsed.hostname)
            is_sound = is_sound and parsed.port != 0 and not any(map(str.isspace, address))
        except ValueError:
            is_sound = False
        if not is_sound:
            raise RefusedError(
                f"{url!r} is no address of NATS: write nats://HOST:PORT, or tls://HOST:PORT, several"
                " with commas between"
            )


def _identity(credentials: Credentials | None) -> dict[str, Any]:
    if credentials is None:
        return {}
    return {
        "tls": credentials.tls_context(),
        # Before the server's greeting: otherwise whoever stands between could claim in it that no
        # TLS is needed, and nats-py would go on without.
        "tls_handshake_first": True,
        "inbox_prefix": inbox_of(credentials.role),
    }


async def discard(client: Client) -> None:
    """Close a client, whatever state it is in; what it had not sent is lost."""
    # On a task of its own: nats-py's tasks wait for one future, and the end of one cancels the other,
    # which must not end who calls this.
    closing = asyncio.ensure_future(client.close())
    try:
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
    finally:
        closing.cancel()
        abort(client)
    await asyncio.gather(closing, return_exceptions=True)


def abort(client: Client) -> None:
    """Drop the connection without an orderly end: that waits for the peer to take what is still to be
    sent, and over TLS for its answer (up to 30 s in asyncio)."""
    writer = getattr(client._transport, "_io_writer", None)
    if writer is not None:
        writer.transport.abort()
