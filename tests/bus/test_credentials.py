"""Who is refused by whom: real servers, real certificates, and one line for people each time."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
from bus_samples import an_event
from secured import connect_as

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import connect
from jigsawrl.bus.credentials import Credentials, header, read_credentials
from jigsawrl.bus.server import EmbeddedServer, start_server
from jigsawrl.cli.credentials import make, server_tls

LONG_AGO = datetime.now(UTC) - timedelta(days=30)

WITHIN_S = 20
"""For what must not wait for a time-out of 60 s."""


async def refused(connecting: Awaitable[object]) -> str:
    """Why, as one line, without waiting for the time-out."""
    async with asyncio.timeout(WITHIN_S):
        with pytest.raises(BusError) as caught:
            await connecting
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_other_header(path: Path, to: Path, *, valid_until: datetime) -> Path:
    """As if the file were about other credentials than it holds."""
    text = path.read_text()
    to.mkdir(exist_ok=True)
    made = to / path.name
    made.write_text(header(path.stem, "red", valid_until) + text.split("\n", 1)[1])
    return made


async def test_a_role_is_let_in_over_tls(credentials: Path, secured_server: EmbeddedServer) -> None:
    assert secured_server.url.startswith("tls://127.0.0.1:")
    bus = await connect_as("client", secured_server, credentials / "red")
    link = await bus.connection.ready()
    assert link.client.is_connected
    await bus.close()


async def test_a_client_on_a_slow_link_is_not_greeted_in_plain_text(
    credentials: Path, secured_server: EmbeddedServer
) -> None:
    """Its handshake comes a round trip after the connection."""
    context = read_credentials(credentials / "red", "client").tls_context()
    reader, writer = await asyncio.open_connection("127.0.0.1", secured_server.port)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await reader.read()
    await writer.start_tls(context, server_hostname="127.0.0.1")
    assert (await reader.readline()).startswith(b"INFO ")
    writer.transport.abort()


async def test_nobody_is_let_in_without_credentials(secured_server: EmbeddedServer) -> None:
    why = await refused(connect(secured_server.url, name="test", timeout_s=60))
    assert "takes TLS with a client certificate only" in why
    assert "--credentials" in why


async def test_credentials_by_another_authority_are_refused_by_both_sides(
    secured_server: EmbeddedServer, credentials: Path, tmp_path: Path
) -> None:
    make(tmp_path / "other", group="red")
    why = await refused(
        connect_as("client", secured_server, tmp_path / "other" / "red", timeout_s=60)
    )
    assert "is not by the authority in" in why
    # One that knows the server's authority, and is not known by it.
    foreign = (tmp_path / "other" / "red" / "client.pem").read_text()
    own = (credentials / "ca.pem").read_text()
    (tmp_path / "client.pem").write_text(foreign + own)
    why = await refused(connect_as("client", secured_server, tmp_path, timeout_s=60))
    assert "does not know the authority of" in why


async def test_expired_credentials_are_refused_before_anybody_is_asked(
    secured_server: EmbeddedServer, tmp_path: Path
) -> None:
    make(tmp_path, group="red", days=1, now=LONG_AGO)
    why = await refused(connect_as("client", secured_server, tmp_path / "red", timeout_s=60))
    assert "client.pem (role client of group red) have expired at" in why
    assert "--renew" in why


async def test_an_end_that_is_near_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, group="red", days=5)
    server = await start_server(tmp_path / "store", tls=server_tls(tmp_path))
    bus = await connect_as("client", server, tmp_path / "red")
    assert "client.pem (role client of group red) expire in 4 days" in caplog.text
    await bus.close()
    server.stop()


async def test_the_server_refuses_an_expired_certificate_whatever_its_file_says(
    tmp_path: Path,
) -> None:
    make(tmp_path / "old", group="red", days=1, now=LONG_AGO)
    next_year = datetime.now(UTC) + timedelta(days=365)
    forged = with_other_header(
        tmp_path / "old" / "red" / "client.pem", tmp_path / "forged", valid_until=next_year
    )
    make(tmp_path / "old", group="red", renew=True)
    server = await start_server(tmp_path / "store", tls=server_tls(tmp_path / "old"))
    why = await refused(connect_as("client", server, forged, timeout_s=60))
    assert "says that the certificate in" in why
    assert "has expired" in why
    server.stop()


async def test_a_server_with_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    make(folder, group="red", days=1, now=LONG_AGO)
    tls = server_tls(shutil.copytree(folder, tmp_path / "old"))
    make(folder, group="red", renew=True)
    server = await start_server(tmp_path / "store", tls=tls)
    why = await refused(connect_as("client", server, folder / "red", timeout_s=60))
    assert f"the certificate of NATS at {server.url} has expired" in why
    server.stop()


async def test_a_server_is_reached_by_the_hosts_of_its_certificate_only(
    credentials: Path, tmp_path: Path
) -> None:
    server = await start_server(tmp_path, host="127.0.0.2", tls=server_tls(credentials))
    why = await refused(connect_as("client", server, credentials / "red", timeout_s=60))
    assert "is for other hosts" in why
    assert "--hosts" in why
    server.stop()


async def test_a_group_that_the_server_does_not_know_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    make(folder, group="red")
    server = await start_server(tmp_path / "store", tls=server_tls(folder))
    make(folder, group="late")
    why = await refused(connect_as("client", server, folder / "late", timeout_s=60))
    assert "knows no role client of group late" in why
    server.stop()


async def test_a_plain_server_is_not_taken_for_one_with_tls(
    nats_server: EmbeddedServer, credentials: Path
) -> None:
    why = await refused(connect_as("client", nats_server, credentials / "red", timeout_s=60))
    assert "speaks no TLS" in why


async def test_a_server_beyond_this_machine_is_not_started_without_tls(tmp_path: Path) -> None:
    with pytest.raises(BusError, match=r"0\.0\.0\.0 can be reached by others.*TLS and credentials"):
        await start_server(tmp_path, host="0.0.0.0")


async def test_a_server_on_all_addresses_is_reached_by_the_loopback_one(
    credentials: Path, tmp_path: Path
) -> None:
    server = await start_server(tmp_path, host="0.0.0.0", tls=server_tls(credentials))
    assert server.url == f"tls://127.0.0.1:{server.port}"
    bus = await connect_as("client", server, credentials / "red")
    await bus.close()
    server.stop()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read"),
        ("-----BEGIN PRIVATE KEY-----\n", "holds no credentials of a role"),
        ("# JigsawRL credentials: client@red until tomorrow\n", "'tomorrow' is no time"),
        ("# JigsawRL credentials: client@red until 2999-01-01T00:00:00Z\n", "can't be used"),
    ],
)
async def test_a_file_that_is_none_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "client.pem"
    if text is not None:
        path.write_text(text)
    why = await refused(connect_as("client", "tls://127.0.0.1:1", path, timeout_s=60))
    assert message in why
    assert str(path) in why


def test_the_group_may_be_left_out_where_there_is_one(credentials: Path, tmp_path: Path) -> None:
    make(tmp_path, group="only")
    assert read_credentials(tmp_path, "node").group == "only"
    assert read_credentials(tmp_path / "only", "node").role == "node"
    with pytest.raises(BusError, match=r"several groups: name one of .*\{blue,red\}"):
        read_credentials(credentials, "node")


async def test_renewed_credentials_are_read_at_the_next_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "credentials"
    make(folder, group="red")
    server = await start_server(tmp_path / "store", tls=server_tls(folder))
    bus = await connect_as("scheduler", server, folder / "red")
    small = msgspec.structs.replace(bus.subjects.events_stream(), max_bytes=1 << 20)
    await bus.create_streams([small])
    # Another authority: for the client that runs, the server is a stranger from now on.
    shutil.rmtree(folder)
    make(folder, group="red")
    server.stop()
    publishing = asyncio.create_task(bus.publish_event(an_event(1)))
    with caplog.at_level(logging.ERROR, logger="jigsawrl.bus"):
        again = await start_server(tmp_path / "store", port=server.port, tls=server_tls(folder))
        async with asyncio.timeout(60):
            assert await publishing == 1
    assert "is not by the authority in" in caplog.text
    await bus.close()
    again.stop()


def test_a_file_of_another_role_is_refused(credentials: Path) -> None:
    with pytest.raises(BusError, match=r"is for the role trainer, and this is node: give .*node"):
        read_credentials(credentials / "red" / "trainer.pem", "node")


def test_a_file_says_who_it_is_for(credentials: Path) -> None:
    found = read_credentials(credentials / "red" / "trainer.pem", "trainer")
    assert isinstance(found, Credentials)
    assert (found.role, found.group) == ("trainer", "red")
    assert found.valid_until > datetime.now(UTC) + timedelta(days=364)
