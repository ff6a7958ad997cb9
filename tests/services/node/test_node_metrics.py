"""What a node tells Prometheus of itself and its tenants, which are real processes here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from jigsawrl import metrics
from jigsawrl.bus.base import BusHealth
from services.exposition import serve_metrics
from services.node.metrics import NodeMetrics, TenantFiles, empty_folder, labels_of
from services.tenant_metrics import FOLDER_VARIABLE, TenantMetrics
from tests.services.scrape import Scraped, scrape

TENANT = """
import sys
from jigsawrl.bus.base import BusHealth
from services.tenant_metrics import build_tenant_metrics
metrics = build_tenant_metrics(pipeline="p", role="rollout", worker=sys.argv[1])
for _ in range(2):
    with metrics.command("load_weights"):
        pass
metrics.note(BusHealth(num_reconnects=1, num_dropped=0, num_dead_letters=0))
metrics.note(BusHealth(num_reconnects=3, num_dropped=0, num_dead_letters=0))
print("counted", flush=True)
sys.stdin.read()
"""


@contextmanager
def tenant(folder: Path, worker: str) -> Iterator[subprocess.Popen[str]]:
    """One that has counted, and lives until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", TENANT, worker],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {FOLDER_VARIABLE: str(folder)},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "counted\n"
        yield process
        process.kill()


def told(files: TenantFiles) -> Scraped:
    registry = CollectorRegistry()
    registry.register(files)
    return Scraped(generate_latest(registry).decode())


def test_each_tenant_has_series_of_its_own_and_they_end_with_it(tmp_path: Path) -> None:
    folder = empty_folder(tmp_path / "metrics")
    files = TenantFiles(folder)
    with tenant(folder, "p.rollout0") as first, tenant(folder, "p.rollout1"):
        found = told(files)
        for worker in ("p.rollout0", "p.rollout1"):
            of = {"pipeline": "p", "role": "rollout", "worker": worker}
            seconds = metrics.COMMAND_SECONDS
            assert found.value(seconds, part="_count", command="load_weights", **of) == 2
            assert found.value(metrics.NATS_RECONNECTS, **of) == 3
            assert found.value(metrics.NATS_DROPPED, **of) == 0
        first.kill()
        first.wait()
        left = told(files)
        assert left.sum(metrics.NATS_RECONNECTS, worker="p.rollout0") == 0
        assert left.sum(metrics.NATS_RECONNECTS, worker="p.rollout1") == 3
    assert told(files).names() == set()
    assert list(folder.iterdir()) == []


def test_the_next_node_begins_with_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "counter_1.db").write_bytes(b"of an earlier node")
    assert list(empty_folder(tmp_path / "metrics").iterdir()) == []


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


async def test_a_node_tells_what_its_tenants_use_and_how_much_room_there_is(
    tmp_path: Path, gone: int
) -> None:
    health = BusHealth(num_reconnects=2, num_dropped=0, num_dead_letters=1)
    pids = {"sort-digits.rollout12": os.getpid(), "p.reward0": gone}
    of_node = NodeMetrics(
        "n",
        lambda: pids,
        health=lambda: health,
        places={"runs": tmp_path / "not" / "made", "node": tmp_path},
    )
    files = TenantFiles(empty_folder(tmp_path / "metrics"))
    async with serve_metrics(("127.0.0.1", 0), of_node.gather, files) as url:
        assert url is not None
        found = await scrape(url)
    assert found.value(metrics.NODE_TENANTS, node="n") == 2
    of = {"pipeline": "sort-digits", "role": "rollout", "worker": "sort-digits.rollout12"}
    memory_bytes, cpu_s = (
        found.value(m, **of) for m in (metrics.TENANT_MEMORY, metrics.TENANT_CPU)
    )
    assert memory_bytes is not None
    assert memory_bytes > 1e6
    assert cpu_s is not None
    assert cpu_s > 0
    assert found.sum(metrics.TENANT_MEMORY, pipeline="p") == 0, "it has ended"
    for place in ("runs", "node"):
        free, size = (found.sum(m, place=place) for m in (metrics.DISK_FREE, metrics.DISK_SIZE))
        assert 0 < free < size
    node = {"pipeline": "", "role": "node", "worker": "n"}
    assert found.value(metrics.NATS_RECONNECTS, **node) == 2
    assert found.value(metrics.DEAD_LETTERS_WRITTEN, **node) == 1


def test_a_tenants_id_says_its_pipeline_and_role() -> None:
    assert labels_of("sort-digits.trainer0") == ("sort-digits", "trainer", "sort-digits.trainer0")


def test_without_the_nodes_variable_nothing_is_counted_or_imported() -> None:
    code = (
        "import sys\n"
        "from services.tenant_metrics import build_tenant_metrics\n"
        "print(type(build_tenant_metrics(pipeline='p', role='r', worker='w')).__name__,"
        " 'prometheus_client' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != FOLDER_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [TenantMetrics.__name__, "False"]
