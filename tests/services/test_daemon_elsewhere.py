"""A daemon at NATS servers that somebody else keeps."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jigsawrl.bus.server import start_server
from tests.integration.daemon_site import Daemon


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    server = asyncio.run(start_server(tmp_path / "somebody"))
    yield server.url
    server.stop()


@pytest.fixture
def daemon(tmp_path: Path) -> Daemon:
    return Daemon(tmp_path)


def test_a_daemon_brings_scheduler_and_node_to_servers_that_are_there(
    daemon: Daemon, url: str
) -> None:
    try:
        told = daemon.ok("up", "--detach", "--devices", "cpu", "--url", url)
        assert url in told
        assert "no pipelines" in daemon.ok("status")
        programs = {" ".join(process.cmdline()) for process in daemon.processes()}
        assert any("services.scheduler" in line for line in programs)
        assert not any("nats-server" in line.split(" ")[0] for line in programs)
        log = daemon.folder / "logs" / "node.log"
        assert socket.gethostname().partition(".")[0] in log.read_text()
    finally:
        daemon.end()


def test_servers_that_do_not_answer_are_refused_with_what_to_do(daemon: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    done = daemon.jigsaw("up", "--url", f"nats://127.0.0.1:{port}")
    assert done.returncode == 2
    assert f"jigsaw up: no NATS server answers at nats://127.0.0.1:{port}" in done.stderr
    refused = daemon.refused("up", "--url", "nats://127.0.0.1:4222", "--listen", "0.0.0.0")
    assert "--listen has no effect with --url" in refused
