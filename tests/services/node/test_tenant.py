"""`TenantProcess` with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device
from jigsawrl.processes import MAX_FAILURES
from services.node.devices import discover
from services.node.leftovers import Leftovers
from services.node.tenant import TenantCommand, TenantProcess
from services.run import EXIT_REFUSED


class Told:
    """What the supervisor told."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.exits: list[tuple[Worker, int, str]] = []
        self.failures: list[tuple[Worker, str]] = []
        self.changed = asyncio.Event()

    async def on_start(self) -> None:
        self.num_starts += 1

    async def on_exit(self, worker: Worker, exit_code: int, reason: str) -> None:
        self.exits.append((worker, exit_code, reason))
        self.changed.set()

    async def on_failure(self, worker: Worker, reason: str) -> None:
        self.failures.append((worker, reason))
        self.changed.set()

    async def wait(self, num_exits: int = 0, num_failures: int = 0) -> None:
        async with asyncio.timeout(20):
            while len(self.exits) < num_exits or len(self.failures) < num_failures:
                self.changed.clear()
                await self.changed.wait()


def start(folder: Path, code: str) -> tuple[TenantProcess, Told]:
    told = Told()
    command = TenantCommand(
        tenant="p.rollout0",
        argv=[sys.executable, "-c", code],
        environment={},
        cores=(),
        log=folder / "tenant.log",
    )
    tenant = TenantProcess(
        command,
        Leftovers(folder / "processes.json"),
        on_start=told.on_start,
        on_exit=told.on_exit,
        on_failure=told.on_failure,
    )
    return tenant, told


async def pid_in(log: Path, *, than: int | None = None) -> int:
    async with asyncio.timeout(20):
        while True:
            lines = log.read_text().split() if log.exists() else []
            if lines and int(lines[-1]) != than:
                return int(lines[-1])
            await asyncio.sleep(0.02)


SLEEPER = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


async def test_a_killed_tenant_comes_back_under_another_boot(tmp_path: Path) -> None:
    tenant, told = start(tmp_path, SLEEPER)
    first = await pid_in(tmp_path / "tenant.log")
    os.kill(first, signal.SIGKILL)
    await told.wait(num_exits=1)
    second = await pid_in(tmp_path / "tenant.log", than=first)
    assert told.exits[0][1] == -signal.SIGKILL
    os.kill(second, signal.SIGKILL)
    await told.wait(num_exits=2)
    assert told.exits[0][0].boot != told.exits[1][0].boot
    await tenant.stop()
    assert told.num_starts in (2, 3)
    assert tenant.pid is None


async def test_five_failures_in_a_row_give_a_tenant_up_with_its_last_words(
    tmp_path: Path,
) -> None:
    tenant, told = start(tmp_path, "import sys; sys.exit('no weights here')")
    await told.wait(num_failures=1)
    assert len(told.exits) == 4
    assert "no weights here" in told.failures[0][1]
    await tenant.stop()


async def test_a_boot_that_is_restarted_on_purpose_does_not_count_as_a_failure(
    tmp_path: Path,
) -> None:
    code = "import sys, time; print(sys.argv[-1], flush=True); time.sleep(60)"
    tenant, told = start(tmp_path, code)
    log, boot = tmp_path / "tenant.log", ""
    for _ in range(MAX_FAILURES + 1):
        async with asyncio.timeout(20):
            while not log.exists() or log.read_text().split()[-1:] in ([], [boot]):
                await asyncio.sleep(0.02)
        assert not tenant.restart(boot)  # an older one
        boot = log.read_text().split()[-1]
        assert tenant.restart(boot)
    assert not told.exits
    assert not told.failures
    await tenant.stop()


async def test_a_tenant_can_be_restarted_whatever_its_boot_is(tmp_path: Path) -> None:
    tenant, told = start(
        tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    )
    first = await pid_in(tmp_path / "tenant.log")
    os.kill(first, signal.SIGSTOP)
    assert not tenant.restart("another")
    assert tenant.restart(None)
    await pid_in(tmp_path / "tenant.log", than=first)
    await tenant.stop()
    assert not told.exits


async def test_a_tenant_whose_folder_was_deleted_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir()
    tenant, told = start(folder, "import time; time.sleep(60)")
    async with asyncio.timeout(20):
        while tenant.pid is None or not told.num_starts:
            await asyncio.sleep(0.01)
    shutil.rmtree(folder)
    os.kill(tenant.pid, signal.SIGKILL)
    await told.wait(num_exits=1)
    assert "its log can't be read" in told.exits[0][2]
    async with asyncio.timeout(20):
        while told.num_starts < 2:
            await asyncio.sleep(0.01)
    await tenant.stop()
    assert not told.failures


async def test_a_tenant_that_can_not_be_run_again_fails_as_the_boot_that_is_known(
    tmp_path: Path,
) -> None:
    tenant, told = start(tmp_path, "import time; time.sleep(60)")
    async with asyncio.timeout(20):
        while tenant.pid is None or not told.num_starts:
            await asyncio.sleep(0.01)
    (tmp_path / "tenant.log").unlink()
    (tmp_path / "tenant.log").mkdir()
    os.kill(tenant.pid, signal.SIGKILL)
    await told.wait(num_failures=1)
    worker, reason = told.failures[0]
    assert worker == told.exits[0][0]
    assert "can't be run here" in reason
    await tenant.stop()


async def test_a_refused_configuration_is_not_tried_again(tmp_path: Path) -> None:
    tenant, told = start(tmp_path, f"import sys; print('bad'); sys.exit({EXIT_REFUSED})")
    await told.wait(num_failures=1)
    assert not told.exits
    await tenant.stop()


async def test_stop_ends_a_tenant_that_ignores_sigterm_and_its_children(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    tenant, told = start(tmp_path, code)
    child = await pid_in(tmp_path / "tenant.log")
    await tenant.stop()
    await asyncio.sleep(0.1)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
    assert not told.exits


async def test_the_next_node_kills_what_a_killed_one_left_behind(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import time; time.sleep(60)", start_new_session=True
    )
    before = Leftovers(tmp_path / "processes.json")
    before.add(process.pid)
    assert Leftovers(tmp_path / "processes.json").kill_all() == 1
    assert await process.wait() == -signal.SIGKILL
    assert Leftovers(tmp_path / "processes.json").kill_all() == 0


async def test_a_reused_pid_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "processes.json"
    path.write_text(json.dumps([{"pid": os.getpid(), "created_s": 1.0}]))
    assert Leftovers(path).kill_all() == 0


def test_devices_that_the_machine_lacks_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cpu:999: not on this machine"):
        discover("n", "cpu:999")
    assert {device.kind for device in discover("n")} <= {"cpu", "cuda"}


def test_a_machine_with_gpus_has_those_or_where_asked_its_cpu_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 0, 1000, NVIDIA H1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert discover("n") == (Device("n", 0, "cuda", 1000 << 20),)
    slots = discover("n", "cpu")
    assert [slot.index for slot in slots] == sorted(os.sched_getaffinity(0))
    assert {slot.kind for slot in slots} == {"cpu"}
