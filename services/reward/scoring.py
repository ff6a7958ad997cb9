"""Scoring in a child process that can be killed: a degenerate answer that makes a scorer spin costs
one sample and one restart, never the service (verl PR 6673, Reasoning360 PR 109 report the freeze).

`python -m services.reward.scoring` is the child: it reads its task, then batches, from standard input
and writes one result a sample, in order, each as length-prefixed MessagePack."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import struct
import sys
import time
from collections.abc import Sequence
from typing import BinaryIO

import msgspec

from jigsawrl.config import TaskConfig
from jigsawrl.processes import die_with_parent
from jigsawrl.tasks import Scored, Task, build_task

START_DEADLINE_S = 60.0
"""Importing a task's package on a busy machine."""
SAMPLE_DEADLINE_S = 5.0
"""One sample; the scorers here need well under a millisecond."""


class ScorerError(Exception):
    """The child process can't start; its own words are in the service's log."""


class Setup(msgspec.Struct, frozen=True):
    """First message to the child."""

    task: TaskConfig
    seed: int


class Sample(msgspec.Struct, frozen=True):
    """One answer to score."""

    fields: dict[str, str]
    response: str


class Result(msgspec.Struct, frozen=True):
    """One score, or why there is none."""

    scored: Scored | None
    error: str = ""


class Scorer:
    """One child process and the pipe to it; restarts it after a deadline or a crash."""

    def __init__(
        self, task: TaskConfig, *, seed: int, sample_deadline_s: float = SAMPLE_DEADLINE_S
    ) -> None:
        self._setup = Setup(task, seed)
        self._sample_deadline_s = sample_deadline_s
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def score(
        self, samples: Sequence[Sample], *, deadline_s: float = math.inf
    ) -> list[Result]:
        """One result a sample, in order; a sample that can't be scored has a reason, not a 0.

        `deadline_s` after the scorer took them up no further try begins: what is left then has that
        as its reason. Raises `ScorerError` where the child can't start: no sample's fault."""
        results: list[Result] = []
        async with self._turn:
            await self._started()
            ends_s = time.monotonic() + deadline_s
            while len(results) < len(samples) and time.monotonic() < ends_s:
                results += await self._score_until_failure(samples[len(results) :], ends_s=ends_s)
        late = Result(
            None, f"not scored within {deadline_s:g} s: the answers before it took too long"
        )
        return results + [late] * (len(samples) - len(results))

    async def start(self) -> None:
        """Have the child ready, so that no deadline of samples pays for its start."""
        async with self._turn:
            await self._started()

    async def close(self) -> None:
        """Kill the child."""
        await self._kill()

    async def _score_until_failure(
        self, samples: Sequence[Sample], *, ends_s: float
    ) -> list[Result]:
        results: list[Result] = []
        try:
            child = await self._started()
            assert child.stdin is not None
            child.stdin.write(_frame(msgspec.msgpack.encode(samples)))
            for _ in samples:
                if time.monotonic() > ends_s:
                    await self._kill()  # it goes on with samples that are given up
                    break
                async with asyncio.timeout(self._sample_deadline_s):
                    payload = await _receive(child)
                results.append(msgspec.msgpack.decode(payload, type=Result))
        except TimeoutError:
            await self._kill()
            results.append(Result(None, f"scoring took over {self._sample_deadline_s:g} s"))
        except (asyncio.IncompleteReadError, ConnectionError):
            await self._kill()
            results.append(Result(None, "the scorer's process died on this sample"))
        except asyncio.CancelledError:
            await self._kill()  # half of a batch's results would be read as the next batch's
            raise
        return results

    async def _started(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        self._child = child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.reward.scoring",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        assert child.stdin is not None
        try:
            child.stdin.write(_frame(msgspec.msgpack.encode(self._setup)))
            async with asyncio.timeout(START_DEADLINE_S):
                await _receive(child)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            await self._kill()
            raise ScorerError(
                f"the scorer's process did not start ({type(error).__name__}): see the log above"
            ) from error
        return child

    async def _kill(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()


async def _receive(child: asyncio.subprocess.Process) -> bytes:
    assert child.stdout is not None
    (size,) = struct.unpack(">I", await child.stdout.readexactly(4))
    return await child.stdout.readexactly(size)


def _frame(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(4)
    if len(header) < 4:
        return None
    return source.read(struct.unpack(">I", header)[0])


def result_of(task: Task, sample: Sample) -> Result:
    """A reward that is no finite number is none: trained on, it would spoil the whole step."""
    try:
        scored = task.score(sample.fields, sample.response)
    except Exception as error:  # any scorer fault is this sample's, told by its reason
        return Result(None, f"{type(error).__name__}: {error}")
    if not math.isfinite(scored.reward):
        return Result(None, f"the reward is {scored.reward}")
    return Result(scored)


def _child() -> None:
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a scorer prints must not be read as a result
    first = _read(source)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    task = build_task(setup.task, seed=setup.seed)
    sink.write(_frame(b"\xc0"))
    sink.flush()
    while (payload := _read(source)) is not None:
        for sample in msgspec.msgpack.decode(payload, type=list[Sample]):
            result = result_of(task, sample)
            sink.write(_frame(msgspec.msgpack.encode(result)))
            sink.flush()


if __name__ == "__main__":
    _child()
