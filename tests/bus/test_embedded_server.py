"""The embedded server: found, refused, restarted, never orphaned."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import connect
from jigsawrl.bus.server import check_version, find_server, start_server


def test_the_server_is_found_beside_python_or_on_the_path(tmp_path: Path):
    program = tmp_path / "nats-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_server(folder=tmp_path, path="") == program
    assert find_server(folder=tmp_path / "none", path=str(tmp_path)) == program
    with pytest.raises(BusError, match="not found: pip install"):
        find_server(folder=tmp_path / "none", path="")


@pytest.mark.parametrize("version", ["v2.10.22", "v2.9.10", "v1.4.1", "no version"])
def test_a_server_that_is_too_old_is_refused(tmp_path: Path, version: str):
    program = tmp_path / "nats-server"
    program.write_text(f"#!/bin/sh\necho 'nats-server: {version}'\n")
    program.chmod(0o755)
    with pytest.raises(BusError, match=r"too old .*2\.11 is needed"):
        check_version(program)


async def test_a_program_that_does_not_run_is_refused(tmp_path: Path):
    with pytest.raises(BusError, match="does not run"):
        await start_server(tmp_path, program=tmp_path / "none")


async def test_a_store_that_is_not_writable_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BusError, match="not writable"):
        await start_server(tmp_path / "file" / "store")


async def test_a_port_in_use_is_refused(tmp_path: Path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(BusError, match=f"port {port} is in use"):
            await start_server(tmp_path, port=port)


async def test_it_listens_on_this_machine_only_and_takes_8_megabytes(tmp_path: Path):
    server = await start_server(tmp_path / "a folder")
    assert server.url.startswith("nats://127.0.0.1:")
    bus = await connect(server.url, name="test")
    link = await bus.connection.ready()
    assert link.client.max_payload == 8 * 1024 * 1024
    await bus.close()
    server.stop()
    assert server.exit_code is not None


async def test_it_comes_back_on_the_same_port(tmp_path: Path):
    server = await start_server(tmp_path)
    server.kill()
    again = await start_server(tmp_path, port=server.port)
    assert again.url == server.url
    again.stop()


async def test_a_server_that_stands_still_can_be_stopped(tmp_path: Path):
    server = await start_server(tmp_path)
    os.kill(server.pid, signal.SIGSTOP)
    started_s = time.monotonic()
    server.stop()
    assert time.monotonic() - started_s < 5


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux sends a death signal")
def test_it_dies_with_its_parent(tmp_path: Path):
    script = (
        "import asyncio, pathlib, time, sys\n"
        "from jigsawrl.bus.server import start_server\n"
        "server = asyncio.run(start_server(pathlib.Path(sys.argv[1])))\n"
        "print(server.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    # Nobody holds the pipe any more: reading ends.
    assert parent.stdout.read() == ""
    parent.stdout.close()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and "Z" not in _state(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"
