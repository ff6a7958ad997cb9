"""Spans of work, taken in any thread, drained by the event loop into `SubStagesEnded` events."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.parts import SubStage

COMPUTED: frozenset[SubStageKind] = frozenset(
    {"reference_logprobs", "proximal_logprobs", "forward_backward", "optimizer"}
)
"""Kinds that the calling thread computes; the others move bytes."""


class Spans:
    """Collects spans; appending and draining are safe from two threads (deque operations are)."""

    def __init__(self) -> None:
        self.on_cpu = False
        """The calling thread computes itself, and no other device."""
        self._ended: deque[SubStage] = deque()

    @contextmanager
    def span(
        self, kind: SubStageKind, *, version: int, num_iterations: int = 1, num_tokens: int = 0
    ) -> Iterator[None]:
        """Time the body; a body that raises leaves no span."""
        started_s = time.time()
        start, cpu_start = time.monotonic(), time.thread_time()
        yield
        duration_s = time.monotonic() - start
        computed = self.on_cpu and kind in COMPUTED
        self._ended.append(
            SubStage(
                kind=kind,
                version=version,
                started_s=started_s,
                ended_s=started_s + duration_s,
                duration_s=duration_s,
                num_iterations=num_iterations,
                num_tokens=num_tokens,
                cpu_s=time.thread_time() - cpu_start if computed else None,
            )
        )

    def drain(self) -> tuple[SubStage, ...]:
        """The spans since the last call, in the order in which they ended."""
        spans = []
        while self._ended:
            spans.append(self._ended.popleft())
        return tuple(spans)
