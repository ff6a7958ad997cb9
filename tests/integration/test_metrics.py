"""A daemon that Prometheus scrapes and whose logs a machine reads."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from jigsawrl import metrics
from tests.integration.daemon_site import Daemon
from tests.services.scrape import Scraped, scrape_now
from tests.services.span_collector import collecting_spans

pytestmark = pytest.mark.slow

WAIT_S = 60.0


def free_ports() -> int:
    """The first of two that follow one another."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except OSError:
                continue
            return port


def check_scheduler(found: Scraped) -> None:
    of = {"pipeline": "tiny"}
    version = found.value(metrics.PIPELINE_VERSION, **of)
    assert version is not None
    assert version >= 2
    assert found.value(metrics.PIPELINE_STATE, state="running", **of) == 1
    reward = found.value(metrics.REWARD_MEAN, **of)
    assert reward is not None
    assert 0 <= reward <= 1
    generated, trained = (
        found.sum(m, **of) for m in (metrics.GENERATED_TOKENS, metrics.TRAINED_TOKENS)
    )
    assert 0 < trained <= generated
    for kind in ("bulk_decode", "forward_backward", "weight_sync"):
        of_kind = {"kind": kind, **of}
        assert found.sum(metrics.SUBSTAGE_SECONDS, part="_count", **of_kind) > 0, kind
    assert found.sum(metrics.GROUPS, fate="trained", **of) >= 8
    assert found.sum(metrics.WORKER_READY, **of) == 5
    wanted, applied = (
        found.sum(m, role="rollout", **of) for m in (metrics.SHARE_WANTED, metrics.SHARE_APPLIED)
    )
    assert 0 < applied <= 1
    assert 0 < wanted <= 1
    assert found.sum(metrics.EVENTS_FOLDED) > 50
    assert found.sum(metrics.DECISION_SECONDS, part="_count") > 0
    assert found.sum(metrics.STREAM_BYTES, stream="JIG_EVENTS") > 0
    committed_s = found.value(metrics.CHECKPOINT_TIME, **of)
    assert committed_s is not None
    assert 0 <= time.time() - committed_s < WAIT_S


def check_node(found: Scraped) -> None:
    assert found.value(metrics.NODE_TENANTS, node="node0") == 5
    of = {"pipeline": "tiny", "role": "trainer", "worker": "tiny.trainer0"}
    assert found.sum(metrics.TENANT_MEMORY, **of) > 10e6
    seconds = {"part": "_count", "command": "batch_cut", **of}
    assert found.sum(metrics.COMMAND_SECONDS, **seconds) >= 2
    roles = {"environment", "reward", "rollout", "trainer", "evaluation"}
    assert all(found.sum(metrics.TENANT_CPU, role=role) > 0 for role in roles)


def check_logs(folder: Path) -> None:
    """Each line is an object with a time, and says who wrote it."""
    logs = [folder / "logs" / "scheduler.log", folder / "logs" / "node.log"]
    logs += folder.glob("node/logs/*.log")
    assert len(logs) == 7
    entries = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    for entry in entries:
        assert datetime.fromisoformat(entry["timestamp"]).tzinfo is not None
        assert {"level", "service", "event"} <= entry.keys()
    (warmed,) = (entry for entry in entries if entry["event"] == "warmed up")
    known = {"service": "trainer", "pipeline": "tiny", "worker": "tiny.trainer0"}
    assert warmed.items() >= known.items()


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the run exports."""
    with collecting_spans() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        yield received


def check_spans(spans: list[Any]) -> None:
    """A step has those of its trainer and of the rollouts that came before it."""
    by_trace: dict[bytes, set[str]] = {}
    for _, span in list(spans):
        by_trace.setdefault(span.trace_id, set()).add(span.name)
    whole = {"prefill", "forward_backward", "optimizer"}
    assert any(
        whole <= names and any(n.startswith("step ") for n in names) for names in by_trace.values()
    )


def test_a_run_is_scraped_and_traced_and_its_logs_are_json(
    daemon: Daemon,
    spans: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("JIGSAW_LOG", "json")
    port = free_ports()
    daemon.ok("up", "--detach", "--devices", "cpu", "--metrics", f"127.0.0.1:{port}")
    of_scheduler, of_node = (f"http://127.0.0.1:{port + i}/metrics" for i in (0, 1))
    daemon.ok("submit", str(daemon.pipeline), "--set", "trainer.num_steps=100000")
    daemon.until(lambda s: s["version"] >= 2 and all(w["state"] == "ready" for w in s["workers"]))
    check_scheduler(scrape_now(of_scheduler))
    check_node(scrape_now(of_node))
    check_logs(daemon.folder)
    _kill(daemon, "tiny.rollout0")
    deadline_s = time.monotonic() + WAIT_S
    while not scrape_now(of_scheduler).sum(metrics.WORKER_EXITS, role="rollout"):
        assert time.monotonic() < deadline_s
        time.sleep(0.2)
    check_spans(spans)
    daemon.ok("cancel", "tiny")
    after = scrape_now(of_scheduler)
    assert after.value(metrics.PIPELINE_STATE, pipeline="tiny", state="failed") == 1
    assert metrics.SEQUENCES_IN_FLIGHT.name not in after.names(), "it has ended"


def _kill(daemon: Daemon, worker: str) -> None:
    (process,) = (
        child
        for child in psutil.Process(daemon.pid).children(recursive=True)
        if worker in child.cmdline()
    )
    process.kill()
