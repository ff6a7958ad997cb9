"""Keeping a child alive, with real processes of the standard library's own programs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jigsawrl.cli.supervisor import GaveUpError, Program, describe_exit, keep_alive, tail

SERVE = ("0", "--bind", "127.0.0.1")


def server(folder: Path) -> Program:
    """A program that lives until it is told to stop."""
    return Program(
        "server", module="http.server", arguments=SERVE, log_path=folder / "logs" / "server.log"
    )


async def test_a_killed_child_comes_back_as_another_process(tmp_path: Path) -> None:
    child, notices = server(tmp_path), asyncio.Queue[str]()
    await child.start()
    keeping = asyncio.create_task(keep_alive(child, on_notice=notices.put_nowait))
    first = child.pid
    os.kill(first, signal.SIGKILL)
    async with asyncio.timeout(20):
        assert await notices.get() == "server ended with signal SIGKILL; starting it again"
        while child.pid == first:
            await asyncio.sleep(0.05)
    keeping.cancel()
    await child.stop(grace_s=5)
    assert not psutil.pid_exists(child.pid)


async def test_a_child_that_keeps_ending_is_given_up_with_its_log(tmp_path: Path) -> None:
    child = Program("zen", module="this", arguments=(), log_path=tmp_path / "zen.log")
    await child.start()
    notices: list[str] = []
    with pytest.raises(GaveUpError, match="zen ended with status 0, for the 5th time") as caught:
        await asyncio.wait_for(keep_alive(child, on_notice=notices.append), 30)
    assert len(notices) == 4
    assert "Namespaces" in caught.value.tail[-1]


async def test_a_stopped_child_ends_within_its_grace(tmp_path: Path) -> None:
    child = server(tmp_path)
    await child.start()
    os.kill(child.pid, signal.SIGSTOP)
    start_s = time.monotonic()
    await child.stop(grace_s=1)
    assert time.monotonic() - start_s < 4
    assert not psutil.pid_exists(child.pid)


async def test_stopping_what_never_started_is_harmless(tmp_path: Path) -> None:
    await server(tmp_path).stop(grace_s=1)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import asyncio, pathlib, sys\n"
        "from jigsawrl.cli.supervisor import Program\n"
        "async def main():\n"
        f"    child = Program('s', module='http.server', arguments={SERVE!r},\n"
        "                    log_path=pathlib.Path(sys.argv[1]))\n"
        "    await child.start()\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive


@pytest.mark.parametrize(
    ("code", "text"), [(3, "status 3"), (-9, "signal SIGKILL"), (-99, "signal 99")]
)
def test_an_exit_code_is_told_in_words(code: int, text: str) -> None:
    assert describe_exit(code) == text


def test_the_tail_of_a_log_can_leave_out_what_was_there_before(tmp_path: Path) -> None:
    log = tmp_path / "daemon.log"
    log.write_text("an earlier reason é\n")
    before = log.stat().st_size
    with log.open("a") as output:
        output.write("this one\n")
    assert tail(log) == ["an earlier reason é", "this one"]
    assert tail(log, after_bytes=before) == ["this one"]
    assert tail(tmp_path / "none") == []
