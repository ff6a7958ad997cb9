"""One tenant process under supervision: start, restart with a backoff, give up, stop.

It knows nothing of the bus: what happened is told by callbacks, which the node turns into events.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from jigsawrl.contract.message import Worker
from jigsawrl.observe import last_words
from jigsawrl.processes import MAX_FAILURES, Restarts, die_with_parent
from services.node.leftovers import Leftovers
from services.run import EXIT_REFUSED

STOP_GRACE_S = 4.0
"""Between SIGTERM and SIGKILL; a node must be gone 5 s after its own SIGTERM."""


class TenantCommand(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one tenant."""

    tenant: str
    argv: Sequence[str]
    """Without ``--boot``, which changes with every start."""
    environment: dict[str, str]
    cores: tuple[int, ...]
    log: Path


class TenantProcess:
    """Keeps one tenant running until stopped or given up."""

    def __init__(
        self,
        command: TenantCommand,
        leftovers: Leftovers,
        *,
        on_start: Callable[[], Awaitable[None]],
        on_exit: Callable[[Worker, int, str], Awaitable[None]],
        on_failure: Callable[[Worker, str], Awaitable[None]],
    ) -> None:
        self._command = command
        self._leftovers = leftovers
        self._on_start = on_start
        self._on_exit = on_exit
        self._on_failure = on_failure
        self._process: asyncio.subprocess.Process | None = None
        self._boot = ""
        self._excused = ""
        """Boot that was killed for no fault of its own."""
        self._stopping = False
        self._task = asyncio.create_task(self._supervise())

    @property
    def pid(self) -> int | None:
        """Of the process that runs; None where none does."""
        process = self._process
        return None if process is None or process.returncode is not None else process.pid

    def restart(self, boot: str | None) -> bool:
        """SIGKILL for the whole process group of `boot`, if it runs (None = whichever does); the next
        starts at once, and this death is not counted. At once, since there may be nothing that still
        answers a signal."""
        process = self._process
        if process is None or process.returncode is not None or boot not in (None, self._boot):
            return False
        self._excused = self._boot
        _signal_group(process.pid, signal.SIGKILL)
        return True

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM, then SIGKILL for the whole process group; returns when it is gone."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            self._task.cancel()  # it waits in a backoff
        else:
            _signal_group(process.pid, signal.SIGTERM)
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                _signal_group(process.pid, signal.SIGKILL)
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _supervise(self) -> None:
        """A machine that can't start or watch the process (no memory, a full disk) fails the tenant:
        a supervisor that ends in silence would leave its pipeline waiting for ever."""
        try:
            await self._keep_running()
        except OSError as error:
            # The boot that ran last: of one that it never heard of, the scheduler believes nothing.
            worker = Worker(id=self._command.tenant, boot=self._boot or uuid.uuid4().hex[:12])
            await self._on_failure(worker, f"{self._command.tenant} can't be run here: {error}")

    async def _keep_running(self) -> None:
        restarts = Restarts()
        while not self._stopping:
            boot = uuid.uuid4().hex[:12]
            worker = Worker(id=self._command.tenant, boot=boot)
            restarts.started()
            exit_code = await self._run_once(boot)
            if self._stopping:
                return
            if self._excused == boot:
                continue
            reason = self._reason(exit_code)
            if exit_code == EXIT_REFUSED:
                await self._on_failure(worker, reason)
                return
            pause_s = restarts.pause_s()
            if pause_s is None:
                await self._on_failure(worker, f"{MAX_FAILURES} failures in a row: {reason}")
                return
            await self._on_exit(worker, exit_code, reason)
            await asyncio.sleep(pause_s)

    async def _run_once(self, boot: str) -> int:
        command = self._command
        command.log.parent.mkdir(parents=True, exist_ok=True)  # somebody may have tidied up
        with command.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command.argv,
                "--boot",
                boot,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | command.environment,
                start_new_session=True,
                preexec_fn=die_with_parent(command.cores),
            )
        self._boot = boot
        pid = self._process.pid
        try:
            self._leftovers.add(pid)
            await self._on_start()
            return await self._process.wait()
        finally:
            # Children of the tenant (scorers, data loaders) must not outlive it.
            _signal_group(pid, signal.SIGKILL)
            self._leftovers.remove(pid)

    def _reason(self, exit_code: int) -> str:
        how = f"signal {-exit_code}" if exit_code < 0 else f"exit status {exit_code}"
        try:
            lines = _tail(self._command.log).strip().splitlines()
        except OSError as error:
            lines = [f"its log can't be read: {error.strerror}"]
        last = last_words(lines[-1].strip()) if lines else "nothing in its log"
        return f"{self._command.tenant} ended with {how}: {last} (log: {self._command.log})"


def _tail(path: Path, num_bytes: int = 4096) -> str:
    with path.open("rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - num_bytes))
        return log.read().decode(errors="replace")


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
