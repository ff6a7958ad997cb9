"""A disk that fills is told."""

import asyncio
from pathlib import Path

from jigsawrl.bus.client import connect
from jigsawrl.cli.disk import LEAST_FREE_BYTES, Disk
from jigsawrl.cli.embedded import EmbeddedSystem, Server
from jigsawrl.cli.supervisor import keep_alive
from jigsawrl.contract.events import Tick


def test_a_full_disk_is_told_once_and_its_end_too() -> None:
    disk = Disk(Path("/runs/tiny-1"), needed_bytes=1 << 30)
    assert disk.notice(LEAST_FREE_BYTES) is None
    told = disk.notice(4096)
    assert told is not None
    assert "the disk of /runs/tiny-1 is full (4096 bytes free)" in told
    assert disk.notice(0) is None
    assert disk.notice((1 << 30) - 1) is None, "nats-server would not start"
    assert disk.is_full
    assert disk.notice(1 << 40) == "the disk of /runs/tiny-1 has room again"
    assert not disk.is_full
    assert disk.notice(0) is not None


async def test_a_store_that_is_started_again_is_the_same(tmp_path: Path) -> None:
    server = Server(tmp_path)
    await server.start()
    notices: list[str] = []
    system = EmbeddedSystem(
        tmp_path,
        server,
        url=server.url,
        runs_folder=tmp_path,
        policy="serial",
        devices="cpu",
        credentials=None,
        metrics=None,
    )
    watching = asyncio.create_task(keep_alive(server, on_notice=notices.append))
    try:
        bus = await connect(system.url, name="test")
        await bus.create_streams(bus.subjects.cluster_streams())
        stored = await bus.publish_event(Tick(id="t1"))
        await system.restart_store()
        assert await bus.publish_event(Tick(id="t2")) == stored + 1
        await bus.close()
        assert len(notices) == 1
    finally:
        watching.cancel()
        await server.stop(grace_s=0)
