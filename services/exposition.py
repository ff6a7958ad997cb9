"""Serves metrics to Prometheus: ``http://HOST:PORT/metrics`` of one process.

Scheduler and node call `serve_metrics`. prometheus-client's own server answers on a thread; what is
told is gathered on the event loop, where the state it is read from changes, as `Families`: plain values
under the names of `jigsawrl.metrics`. A service that can't listen says so and works on: no run ends for
that.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import threading
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from wsgiref.simple_server import WSGIServer

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from jigsawrl.bus.base import BusHealth
from jigsawrl.metrics import (
    DEAD_LETTERS_WRITTEN,
    DISK_FREE,
    DISK_SIZE,
    LOOPBACK,
    NATS_DROPPED,
    NATS_RECONNECTS,
    Metric,
    format_address,
    parse_address,
)

log = structlog.get_logger()

GATHER_TIMEOUT_S = 5.0
"""A loop that is busy for longer answers no scrape: Prometheus sees the target as down. Within the 10 s
that Prometheus waits."""


def add_metrics(parser: argparse.ArgumentParser) -> None:
    """The option of a service that serves metrics."""
    parser.add_argument(
        "--metrics",
        type=_address,
        metavar="HOST:PORT",
        help="serve metrics there; port 0: a free one, see the log; default: none are served",
    )


def _address(text: str) -> tuple[str, int]:
    try:
        return parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class Histogram:
    """Counts values per bucket; cheap, and of one thread."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, num: int = 1) -> None:
        """`num` values that are alike."""
        self._counts[bisect_left(self._bounds, value)] += num
        self.total += value * num

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus has it."""
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets


class Families:
    """Values that one scrape tells."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def __iter__(self) -> Iterator[Family]:
        return iter(self._families.values())

    def add(self, metric: Metric, value: float | None, *labels: str) -> None:
        """A counter's or gauge's value; None is not told."""
        if value is None:
            return
        family = self._family(metric)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)

    def add_histogram(self, metric: Metric, histogram: Histogram, *labels: str) -> None:
        """The same of a histogram."""
        family = self._family(metric)
        assert isinstance(family, HistogramMetricFamily)
        family.add_metric(labels, histogram.cumulative(), histogram.total)

    def add_health(self, health: BusHealth, *process: str) -> None:
        """Of this process's connection."""
        self.add(NATS_RECONNECTS, health.num_reconnects, *process)
        self.add(NATS_DROPPED, health.num_dropped, *process)
        self.add(DEAD_LETTERS_WRITTEN, health.num_dead_letters, *process)

    def _family(self, metric: Metric) -> Family:
        family = self._families.get(metric.name)
        if family is None:
            make = {
                "counter": CounterMetricFamily,
                "gauge": GaugeMetricFamily,
                "histogram": HistogramMetricFamily,
            }[metric.kind]
            family = self._families[metric.name] = make(
                metric.name, metric.help, labels=metric.labels
            )
        return family


Gather = Callable[[], Awaitable[Iterable[Family]]]


class LoopCollector(Collector):
    """Gathers on the event loop that made it, called from any other thread."""

    def __init__(self, gather: Gather) -> None:
        self._gather = gather
        self._loop = asyncio.get_running_loop()

    def collect(self) -> Iterable[Family]:
        """One scrape; nothing of a program that is about to end."""
        if self._loop.is_closed():
            return ()
        return asyncio.run_coroutine_threadsafe(self._gathered(), self._loop).result(
            GATHER_TIMEOUT_S
        )

    async def _gathered(self) -> Iterable[Family]:
        return await self._gather()


class Merged(Collector):
    """Several as one: what two of them tell under one name is one family, as the format wants it."""

    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = tuple(collectors)

    def collect(self) -> Iterable[Family]:
        """One scrape."""
        merged: dict[str, Family] = {}
        for collector in self._collectors:
            for family in collector.collect():
                known = merged.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        return merged.values()


@contextlib.asynccontextmanager
async def serve_metrics(
    address: tuple[str, int] | None, gather: Gather, *others: Collector
) -> AsyncIterator[str | None]:
    """Serve what `gather` gives, and what other collectors do, as long as the block lasts; the URL, or
    None where nothing is served."""
    if address is None:
        yield None
        return
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Merged((LoopCollector(gather), *others)))
    host, port = address
    try:
        # On a thread: it asks for the name of the host, which may take seconds.
        server, _ = await asyncio.to_thread(start_http_server, port, addr=host, registry=registry)
    except OSError as error:
        reason = f"{format_address(host, port)}: {error.strerror or error}"
        log.error("serves no metrics", reason=reason)
        yield None
        return
    url = f"http://{format_address(host, server.server_port)}/metrics"
    log.info("metrics", url=url)
    if host not in LOOPBACK:
        log.warning("metrics can be read from other machines, by anybody", url=url)
    try:
        yield url
    finally:
        # Nobody waits for it: the server looks every half second only whether it is told to end.
        threading.Thread(target=_close, args=(server,), daemon=True).start()


def _close(server: WSGIServer) -> None:
    server.shutdown()
    server.server_close()


def add_disk(families: Families, place: str, folder: Path) -> None:
    """Room on the disk where a folder lies, or will."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    usage = shutil.disk_usage(existing)
    families.add(DISK_FREE, usage.free, place)
    families.add(DISK_SIZE, usage.total, place)
