"""Real certificates for the bus tests, and connections of each role."""

from __future__ import annotations

from pathlib import Path

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.credentials import read_credentials
from jigsawrl.bus.server import EmbeddedServer


async def connect_as(
    role: str, server: EmbeddedServer | str, folder: Path, *, timeout_s: float = 10
) -> NatsBus:
    """A bus of `role`, by the credentials of the group in `folder`."""
    url = server if isinstance(server, str) else server.url
    credentials = read_credentials(folder, role)
    return await connect(url, name=role, timeout_s=timeout_s, credentials=credentials)
