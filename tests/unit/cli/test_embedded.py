"""The embedded nats-server as a supervised child."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from jigsawrl.bus.client import connect
from jigsawrl.cli.embedded import Server, embedded_system
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.supervisor import keep_alive


async def test_a_killed_server_comes_back_on_its_port_with_its_store(tmp_path: Path) -> None:
    server, notices = Server(tmp_path / "nats"), asyncio.Queue[str]()
    await server.start()
    url = server.url
    bus = await connect(url, name="test")
    await bus.create_streams([bus.subjects.snapshots_stream()])
    await bus.save_snapshot(b"kept")
    keeping = asyncio.create_task(keep_alive(server, on_notice=notices.put_nowait))
    for process in psutil.Process().children():
        if str(tmp_path) in " ".join(process.cmdline()):
            process.kill()
    assert "nats-server ended" in await asyncio.wait_for(notices.get(), 20)
    assert await asyncio.wait_for(bus.load_snapshots(), 20) == [b"kept"]
    assert server.url == url
    await bus.close()
    keeping.cancel()
    await server.stop(grace_s=1)


async def test_a_store_that_can_not_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "nats").write_text("a file where the store should be")
    with pytest.raises(CommandError, match="not writable") as caught:
        async with embedded_system(tmp_path, policy="serial"):
            pass
    assert caught.value.status == 2
