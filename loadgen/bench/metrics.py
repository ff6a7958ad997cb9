"""``python -m loadgen.bench.metrics [--json]``: what metrics and trace headers cost the scheduler.

*events_per_s* is over all events of a simulated cluster (`cluster`, the policy `jigsaw`), decisions
included: as they are handled, and with the time that counting each of them takes on top. *scrape_ms* is
what the scheduler's loop spends to gather one scrape, a pipeline at a time, and *render_ms* what its
server's thread spends to make text of it; *kb* is its size. *header_us* is one ``traceparent``. All is
CPU time of the thread, so that others may work on the machine. Garbage is collected by reference
counts only, as in the service.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.events import Event
from jigsawrl.tracing import Traces
from loadgen.bench.cluster import Cluster
from loadgen.bench.output import parser_of, say_of
from loadgen.bench.scheduler import DEVICES_PER_NODE, specs
from services.exposition import Families
from services.scheduler.meter import Meter
from services.scheduler.pipeline_metrics import add_cluster, add_pipeline

ROWS = ((8, 2), (64, 16), (256, 64))
"""(devices, pipelines)."""

WARM_STEPS = 2
NUM_EVENTS = 20_000
NUM_SCRAPES = 30
NUM_HEADERS = 100_000


class Counted:
    """Watches one cluster, and counts what it sees as the service would."""

    def __init__(self, cluster: Cluster) -> None:
        self.meter = Meter()
        self.num_events = 0
        self.handled_s = 0.0
        self.counted_s = 0.0
        self._state = cluster.scheduler.state
        self._decided_s = self._state.decided_s

    def __call__(self, event: Event, taken_s: float) -> None:
        """One event was handled."""
        decided, self._decided_s = self._state.decided_s != self._decided_s, self._state.decided_s
        stored = StoredEvent(
            sequence=self._state.sequence, timestamp_s=time.time(), event=event, payload=b""
        )
        started_s = time.thread_time()
        self.meter.folded(stored, (), taken_s=taken_s, decided=decided, ignored=False)
        self.counted_s += time.thread_time() - started_s
        self.handled_s += taken_s
        self.num_events += 1


class One(Collector):
    """What was gathered."""

    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        """All of it."""
        return self._families


def measure(num_devices: int, num_pipelines: int) -> dict[str, float]:
    """One row."""
    per_node = min(DEVICES_PER_NODE, num_devices)
    cluster = Cluster(
        num_nodes=num_devices // per_node,
        devices_per_node=per_node,
        specs=specs(num_devices, num_pipelines),
        policy="jigsaw",
    )
    cluster.timer = time.thread_time
    state = cluster.scheduler.state
    cluster.run(lambda: all((p.version or 0) >= WARM_STEPS for p in state.pipelines.values()))
    gc.collect()
    counted = Counted(cluster)
    cluster.watch = counted
    cluster.run(lambda: counted.num_events >= NUM_EVENTS)
    gathered: list[Families] = []

    def gather() -> None:
        families = Families()
        counted.meter.add_to(families)
        add_cluster(families, state)
        for pipeline in state.pipelines.values():
            add_pipeline(families, pipeline)
        gathered.append(families)

    scrape_s = _median_s(gather)
    registry = CollectorRegistry()
    registry.register(One(gathered[-1]))
    render_s = _median_s(lambda: generate_latest(registry))
    return {
        "devices": num_devices,
        "pipelines": num_pipelines,
        "events_per_s": round(counted.num_events / counted.handled_s),
        "events_per_s_counted": round(counted.num_events / (counted.handled_s + counted.counted_s)),
        "count_us": round(counted.counted_s / counted.num_events * 1e6, 2),
        "scrape_ms": round(scrape_s * 1e3, 2),
        "render_ms": round(render_s * 1e3, 2),
        "kb": round(len(generate_latest(registry)) / 1000),
    }


def header_us() -> float:
    """Of one message."""
    traces = Traces()
    started_s = time.thread_time()
    for number in range(NUM_HEADERS):
        traces.headers(f"sequences_finished:p.rollout0:b:{number}", cause="1234.5")
    return (time.thread_time() - started_s) / NUM_HEADERS * 1e6


def _median_s(work: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(NUM_SCRAPES):
        started_s = time.thread_time()
        work()
        taken_s.append(time.thread_time() - started_s)
    return statistics.median(taken_s)


def main() -> None:
    """Print the cost."""
    options = parser_of("metrics", __doc__).parse_args()
    say = say_of(options)
    gc.disable()
    rows = []
    for devices, pipelines in ROWS:
        rows.append(measure(devices, pipelines))
        say("  ".join(f"{name} {value}" for name, value in rows[-1].items()))
    print(json.dumps({"rows": rows, "header_us": round(header_us(), 2)}), flush=True)


if __name__ == "__main__":
    main()
