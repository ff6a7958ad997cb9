"""A pool of scorer processes with a deadline per sample.

Asyncio's time-out alone would leave the computation running (LLM360/Reasoning360#109), and a scorer
on the service's own thread lets one degenerate answer freeze the job (verl-project/verl#6673). So a
sample that exceeds its deadline costs its process group, which is started anew, and is reported as
failed, never as worth 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence

from jigsawrl.processes import die_with_parent
from jigsawrl.tasks import Scored
from services.reward.frames import HEADER, Frame, Ready, Result, Sample, Setup, Unscorable
from services.reward.frames import pack as pack_frame
from services.reward.frames import unpack as unpack_frame

START_TIMEOUT_S = 60.0
"""Importing reasoning-gym and drawing its held-out set takes seconds on a busy core."""

SCORER_COMMAND = (sys.executable, "-m", "services.reward.scorer")


class ScoringError(Exception):
    """A sample can't be scored; the text is the reason, one line."""


class ScorerPool:
    """Scores samples on `num_scorers` processes, started when first needed."""

    def __init__(
        self,
        setup: Setup,
        *,
        num_scorers: int,
        deadline_s: float,
        command: Sequence[str] = SCORER_COMMAND,
    ) -> None:
        self._scorers = [_Scorer(setup, command, deadline_s=deadline_s) for _ in range(num_scorers)]
        self._idle: asyncio.LifoQueue[_Scorer] = asyncio.LifoQueue()
        for scorer in self._scorers:
            self._idle.put_nowait(scorer)

    async def score(self, fields: dict[str, str], response: str) -> Scored:
        """One sample's score; raises `ScoringError`."""
        scorer = await self._idle.get()
        try:
            return await scorer.score(Sample(fields=fields, response=response))
        finally:
            self._idle.put_nowait(scorer)

    async def close(self) -> None:
        """Kill all processes."""
        for scorer in self._scorers:
            await scorer.kill()


class _Scorer:
    """One process, or none while none is needed."""

    def __init__(self, setup: Setup, command: Sequence[str], *, deadline_s: float) -> None:
        self._setup = setup
        self._command = command
        self._deadline_s = deadline_s
        self._process: asyncio.subprocess.Process | None = None

    async def score(self, sample: Sample) -> Scored:
        in_step = False
        try:
            if self._process is None:
                await self._start()
            reply = await self._ask(sample, timeout_s=self._deadline_s, what="scoring")
            in_step = True
        finally:
            # After a time-out, an end or a cancellation the pipe may hold another sample's answer.
            if not in_step:
                await self.kill()
        if isinstance(reply, Unscorable):
            raise ScoringError(reply.reason)
        assert isinstance(reply, Result)
        return Scored(reward=reply.reward, correct=reply.correct)

    async def kill(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        reply = await self._ask(self._setup, timeout_s=START_TIMEOUT_S, what="starting the scorer")
        assert isinstance(reply, Ready)

    async def _ask(self, frame: Frame, *, timeout_s: float, what: str) -> Frame:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                process.stdin.write(pack_frame(frame))
                await process.stdin.drain()
                header = await process.stdout.readexactly(HEADER.size)
                return unpack_frame(await process.stdout.readexactly(*HEADER.unpack(header)))
        except TimeoutError as error:
            raise ScoringError(f"{what} took longer than {timeout_s:g} s") from error
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            code = await process.wait()
            raise ScoringError(
                f"{what}: the process ended with {_how(code)}; see its log"
            ) from error


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit status {code}"
