"""The profiler's worker processes: two per kind, pinned to one core, silent until told to run."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from jigsawrl.config import PipelineConfig, encode_config
from jigsawrl.contract.message import SubStageKind


class Worker:
    """One process."""

    def __init__(self, kind: SubStageKind, config: PipelineConfig, *, core: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadgen.profile.worker", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        os.sched_setaffinity(self._process.pid, {core})
        self._tell(encode_config(config).hex())

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        """Until its model is built; raises RuntimeError where it died."""
        if self._hear() != "ready":
            raise RuntimeError("a profiled process did not start; its error stands above")

    def go(self) -> None:
        """Run until `stop`."""
        self._tell("go")

    def stop(self) -> None:
        """End after the running iteration."""
        self._tell("stop")

    def result(self) -> tuple[int, float]:
        """(iterations, seconds) since the last `go`."""
        num, seconds = self._hear().split()
        return int(num), float(seconds)

    def close(self) -> None:
        """Kill it."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # closes its pipes

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def start_workers(
    config: PipelineConfig, kinds: Iterable[SubStageKind], *, core: int
) -> Iterator[dict[SubStageKind, tuple[Worker, Worker]]]:
    """Two of each kind, ready; killed at the end."""
    started: list[Worker] = []
    workers: dict[SubStageKind, tuple[Worker, Worker]] = {}
    try:
        for kind in kinds:
            pair = Worker(kind, config, core=core), Worker(kind, config, core=core)
            started += pair
            workers[kind] = pair
        for worker in started:
            worker.wait_ready()
        yield workers
    finally:
        for worker in started:
            worker.close()
