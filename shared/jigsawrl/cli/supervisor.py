"""Keeps one child process alive: restarts it after a crash, gives it up when it keeps crashing.

Called by `embedded`. A child is anything with the four methods of `Child`; `Program` is a Python
module run as a process. It knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, Protocol

from jigsawrl.bus.credentials import ENVIRONMENT
from jigsawrl.cli.log_files import last_lines, put_aside
from jigsawrl.processes import MAX_FAILURES, Restarts, die_with_parent

TAIL_LINES = 12
"""Of a log, shown with the reason."""


class GaveUpError(Exception):
    """A child failed too often; the text is one line, `tail` the end of its log."""

    def __init__(self, text: str, *, tail: Sequence[str]) -> None:
        super().__init__(text)
        self.tail = tuple(tail)


class StartError(Exception):
    """A child could not be started again; counts as a failure."""


class Child(Protocol):
    """One process that can be started again after it ended."""

    name: str
    log_path: Path

    async def start(self) -> None:
        """Start it; raises `StartError`."""

    async def wait(self) -> int:
        """Its exit code, when it ends."""

    async def stop(self, *, grace_s: float) -> None:
        """End it: SIGTERM, then SIGKILL after `grace_s`; harmless when it has ended."""


async def keep_alive(child: Child, *, on_notice: Callable[[str], None]) -> NoReturn:
    """Watch a started child until cancelled; raises `GaveUpError`."""
    restarts = Restarts()
    while True:
        try:
            code = await child.wait()
            reason = f"{child.name} ended with {describe_exit(code)}"
            while True:
                pause_s = restarts.pause_s()
                if pause_s is None:
                    raise GaveUpError(
                        f"{reason}, for the {MAX_FAILURES}th time in a row; see {child.log_path}",
                        tail=tail(child.log_path),
                    )
                on_notice(f"{reason}; starting it again")
                await asyncio.sleep(pause_s)
                restarts.started()
                await child.start()
                break
        except StartError as error:
            reason = f"{child.name} did not start ({error})"


def describe_exit(code: int) -> str:
    """``status 1`` or ``signal SIGKILL``."""
    if code >= 0:
        return f"status {code}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-code).name}"
    return f"signal {-code}"


def tail(path: Path, *, after_bytes: int = 0) -> list[str]:
    """The last lines of a log, of those behind its first `after_bytes`; empty where there is none."""
    return last_lines(path, TAIL_LINES, begin=after_bytes)


class Program:
    """``python -m MODULE ...`` with its output in a log file; dies with this process."""

    def __init__(self, name: str, *, module: str, arguments: Sequence[str], log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._command = (sys.executable, "-m", module, *arguments)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """In a session of its own, so that a Ctrl-C reaches it only through us."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        put_aside(self.log_path)
        with self.log_path.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=child_environment(),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )

    async def wait(self) -> int:
        """Until the process ends."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, *, grace_s: float) -> None:
        """SIGCONT too: a stopped process takes SIGTERM only when it goes on."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            process.send_signal(signal.SIGCONT)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def child_environment() -> dict[str, str]:
    """Ours, with one thread for each library: parallelism comes from processes, not from threads.
    Without the credentials of whoever calls: our own server may take none, or others."""
    defaults = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    ours = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
    return defaults | ours
