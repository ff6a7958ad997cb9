"""The embedded nats-server as a supervised child."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Literal

import psutil
import pytest

from jigsawrl.bus.client import connect
from jigsawrl.cli.embedded import Listening, Server, device_kind, embedded_system
from jigsawrl.cli.errors import CommandError
from jigsawrl.cli.supervisor import keep_alive
from jigsawrl.config import InitModelConfig, PipelineConfig, SortDigitsConfig, TrainerConfig


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


async def test_a_server_listens_where_it_is_told(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    server = Server(tmp_path / "nats", Listening(port=port, sync_interval="always"))
    await server.start()
    assert server.url == f"nats://127.0.0.1:{port}"
    assert 'sync_interval: "always"' in (tmp_path / "nats" / "nats-server.conf").read_text()
    await server.stop(grace_s=1)


async def test_a_store_that_can_not_be_written_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "nats").write_text("a file where the store should be")
    with pytest.raises(CommandError, match="not writable") as caught:
        async with embedded_system(
            tmp_path, runs_folder=tmp_path / "runs", policy="serial", devices="auto"
        ):
            pass
    assert caught.value.status == 2


def machine_with_gpus(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the command can see: by a program of that name."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def on(device: Literal["auto", "cpu", "cuda"]) -> PipelineConfig:
    return PipelineConfig(
        name="p",
        model=InitModelConfig(),
        task=SortDigitsConfig(),
        trainer=TrainerConfig(num_steps=1),
        device=device,
    )


def test_profiles_are_of_the_devices_that_the_pipelines_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_gpus("echo 0, 1000, NVIDIA H1", tmp_path, monkeypatch)
    assert device_kind([on("cpu"), on("cpu")]) == "cpu"
    assert device_kind([on("cpu"), on("auto")]) == "NVIDIA H1"
    assert device_kind([on("cuda")]) == "NVIDIA H1"


def test_a_driver_that_hangs_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine_with_gpus("exec sleep 60", tmp_path, monkeypatch)
    with pytest.raises(CommandError, match="nvidia-smi has not named the GPUs") as caught:
        device_kind([on("auto")], timeout_s=0.2)
    assert caught.value.status == 2
    assert "\n" not in str(caught.value)
