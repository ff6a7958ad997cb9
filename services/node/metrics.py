"""What a node serves to Prometheus: what its tenants count, what they use, and the room on its disk.

Tenants count in files of their process (`services.tenant_metrics`), in a folder that begins empty with
each node, since it adopts no tenant of an earlier one. The files of a process that ended go at the next
scrape: its series end, and those of the next one, which bear the same labels, begin at 0.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from jigsawrl.bus.base import BusHealth
from jigsawrl.metrics import NODE_TENANTS, TENANT_CPU, TENANT_MEMORY
from services.exposition import Families, add_disk

Tenants = Callable[[], Mapping[str, int]]
"""Running tenants: id -> process id."""


def empty_folder(folder: Path) -> Path:
    """The folder, with nothing in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


class TenantFiles(Collector):
    """The sum of what the tenants' processes have counted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reading = threading.Lock()
        """Two scrapes at once: what one removes the other may be about to read."""

    def collect(self) -> Iterable[Family]:
        """One scrape."""
        with self._reading:
            self.forget_ended()
            registry = CollectorRegistry()
            # Passing the folder keeps prometheus-client from asking for the variable of tenants.
            MultiProcessCollector(registry, path=str(self._folder))
            return list(registry.collect())

    def forget_ended(self) -> None:
        """Remove the files of processes that are gone."""
        for path in self._folder.glob("*.db"):
            pid = path.stem.rpartition("_")[2]
            if not pid.isdigit() or not psutil.pid_exists(int(pid)):
                path.unlink(missing_ok=True)


class NodeMetrics:
    """What the node knows itself."""

    def __init__(
        self,
        node: str,
        tenants: Tenants,
        *,
        health: Callable[[], BusHealth],
        places: Mapping[str, Path],
    ) -> None:
        """`places`: name -> folder, of which the disk is told."""
        self._node = node
        self._tenants = tenants
        self._health = health
        self._places = places

    async def gather(self) -> Families:
        """One scrape. The kernel is asked on a thread: a disk may hang."""
        families = Families()
        tenants = dict(self._tenants())
        families.add(NODE_TENANTS, len(tenants), self._node)
        families.add_health(self._health(), "", "node", self._node)
        await asyncio.to_thread(self._add_use, families, tenants)
        return families

    def _add_use(self, families: Families, tenants: dict[str, int]) -> None:
        for tenant, pid in tenants.items():
            try:
                process = psutil.Process(pid)
                memory_bytes, times = process.memory_info().rss, process.cpu_times()
            except psutil.Error:
                continue  # it has just ended
            labels = labels_of(tenant)
            families.add(TENANT_MEMORY, memory_bytes, *labels)
            families.add(TENANT_CPU, times.user + times.system, *labels)
        for name, folder in self._places.items():
            add_disk(families, name, folder)


def labels_of(tenant: str) -> tuple[str, str, str]:
    """``sort-digits.rollout0`` -> pipeline, role, worker."""
    pipeline, _, name = tenant.partition(".")
    return pipeline, name.rstrip("0123456789"), tenant
