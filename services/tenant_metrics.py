"""What a tenant counts of itself, for its node to serve: prometheus-client in its multiprocess mode.

The node starts tenants with ``PROMETHEUS_MULTIPROC_DIR`` where it serves metrics; each writes into
files there that bear its process id, and the node reads them. Without that variable nothing is counted
and prometheus-client is not imported.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jigsawrl.bus.base import BusHealth
from jigsawrl.metrics import (
    COMMAND_SECONDS,
    DEAD_LETTERS_WRITTEN,
    NATS_DROPPED,
    NATS_RECONNECTS,
    Metric,
)

if TYPE_CHECKING:
    from prometheus_client import Counter

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


class TenantMetrics:
    """Counts nothing."""

    @contextlib.contextmanager
    def command(self, tag: str) -> Iterator[None]:
        """Around the work of one command."""
        yield

    def note(self, health: BusHealth) -> None:
        """How the connection fares, now and then."""


class CountedMetrics(TenantMetrics):
    """Counts in the files of this process."""

    def __init__(self, *, pipeline: str, role: str, worker: str) -> None:
        from prometheus_client import Counter, Histogram

        self._process = (pipeline, role, worker)
        self._seconds = Histogram(
            COMMAND_SECONDS.name,
            COMMAND_SECONDS.help,
            COMMAND_SECONDS.labels,
            buckets=COMMAND_SECONDS.buckets,
            registry=None,
        )

        def counter(metric: Metric) -> Counter:
            return Counter(metric.name, metric.help, metric.labels, registry=None)

        self._health = [counter(m) for m in (NATS_RECONNECTS, NATS_DROPPED, DEAD_LETTERS_WRITTEN)]
        self._noted = BusHealth(0, 0, 0)
        self.note(self._noted)

    @contextlib.contextmanager
    def command(self, tag: str) -> Iterator[None]:
        """Not of one that fails: the process ends with it, and with that its files."""
        started_s = time.perf_counter()
        yield
        self._seconds.labels(*self._process, tag).observe(time.perf_counter() - started_s)

    def note(self, health: BusHealth) -> None:
        """What is new since the last time."""
        for counter, now, before in zip(self._health, health, self._noted, strict=True):
            counter.labels(*self._process).inc(now - before)
        self._noted = health


def build_tenant_metrics(*, pipeline: str, role: str, worker: str) -> TenantMetrics:
    """What the node asks for."""
    if not os.environ.get(FOLDER_VARIABLE):
        return TenantMetrics()
    return CountedMetrics(pipeline=pipeline, role=role, worker=worker)
