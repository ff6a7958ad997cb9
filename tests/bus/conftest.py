"""Restarting a killed server on its port and store; a server with credentials."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from secured import connect_as

from jigsawrl.bus.server import EmbeddedServer, start_server
from jigsawrl.cli.credentials import make, server_tls
from tests.conftest import small_streams


@pytest.fixture
async def restart() -> AsyncIterator[Callable[[EmbeddedServer], Awaitable[EmbeddedServer]]]:
    """Start a server again, where it was."""
    started: list[EmbeddedServer] = []

    async def again(server: EmbeddedServer) -> EmbeddedServer:
        new = await start_server(server.log_path.parent, port=server.port)
        started.append(new)
        return new

    yield again
    for server in started:
        server.stop()


@pytest.fixture(scope="session")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `jigsaw credentials` makes, for the groups ``red`` and ``blue``."""
    folder = tmp_path_factory.mktemp("credentials")
    make(folder, group="red")
    make(folder, group="blue")
    return folder


@pytest.fixture(scope="module")
def secured_server(
    credentials: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EmbeddedServer]:
    """A server that takes those credentials only, with the streams of both groups."""
    store = tmp_path_factory.mktemp("secured")
    server = asyncio.run(start_server(store, tls=server_tls(credentials)))

    async def fill() -> None:
        for group in ("red", "blue"):
            bus = await connect_as("scheduler", server, credentials / group)
            await bus.create_streams(small_streams(bus))
            await bus.close()

    asyncio.run(fill())
    yield server
    server.stop()
