"""Restarting a killed server on its port and store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from jigsawrl.bus.server import EmbeddedServer, start_server


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
