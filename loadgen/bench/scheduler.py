"""``python -m loadgen.bench.scheduler [--json]``: what `jigsaw` costs by size of cluster.

Each row is a simulated cluster (`cluster`) with a real `Scheduler` in it: pipelines in both modes, of
different sizes, whose tenants are placed by the policy itself, about three a device, so that
most devices are shared. It runs until every pipeline has steps in its history; only then is measured,
since before any history nothing is searched.

A *decision* is one call of `Scheduler.handle` in which look-ahead searched, among two candidates or
more, or a step was planned, that is, choices of its workers were played: the event's fold, the decision
pass over all marked pipelines, the search, the shares and all commands. Passes in which there was one
thing to do count apart. Mean, median and 99th percentile are over the decisions of a row. As in the
service, garbage is collected with snapshots only (here once, before a row is measured): nothing in the
state refers to itself, so that it needs none. With `--cpu-time` the thread's CPU time counts instead of
the wall clock: for a machine on which others work, too.
`events_per_s` is over all events that led to no decision pass, of the row where it is least: they are
what the stream may bring between two passes. The growth exponent is the slope of a least-squares line
through (log devices, log mean decision time) of all rows.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from random import Random

import msgspec

from jigsawrl.contract.events import Event
from jigsawrl.contract.spec import PipelineSpec
from jigsawrl.core.outlook import Decided
from loadgen.bench.cluster import Cluster
from loadgen.bench.output import parser_of, say_of

ROWS = ((8, 2), (8, 4), (64, 8), (64, 16), (1024, 16), (1024, 64))
"""(devices, pipelines)."""

NUM_DECISIONS = 400
"""Per row: the 99th percentile is then the fourth largest."""

WARM_STEPS = 2
"""Of every pipeline: history begins when the second step has ended."""

TENANTS_PER_DEVICE = 3.0
DEVICES_PER_NODE = 16
SEQUENCES_PER_WORKER = 16
GROUP_SIZE = 8


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What is printed of one cluster."""

    devices: int
    pipelines: int
    mean_ms: float
    p50_ms: float
    p99_ms: float


class Measured:
    """Watches one cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._state = cluster.scheduler.state
        self._passed_s = self._state.decided_s
        self._last = self._newest()
        self._next_s = self._state.outlooks.next_s
        self.folds_s: list[float] = []
        self.passes_s: list[float] = []
        self.decisions_s: list[float] = []
        self.num_planned = 0
        """Decisions that planned a step."""
        self.num_expanded: list[int] = []
        self.num_candidates: list[int] = []

    def __call__(self, event: Event, taken_s: float) -> None:
        """One event was handled."""
        if self._state.decided_s == self._passed_s:
            self.folds_s.append(taken_s)
            return
        self._passed_s = self._state.decided_s
        newest, last, next_s = self._newest(), self._last, self._next_s
        self._last, self._next_s = newest, self._state.outlooks.next_s
        if newest is not None and newest is not last and newest.num_candidates > 1:
            self.decisions_s.append(taken_s)
            self.num_expanded.append(newest.num_expanded)
            self.num_candidates.append(newest.num_candidates)
        elif newest is last and self._next_s != next_s:
            # What was played for a plan puts the next search off, and so none was in this pass.
            self.decisions_s.append(taken_s)
            self.num_planned += 1
        else:
            self.passes_s.append(taken_s)

    def _newest(self) -> Decided | None:
        decisions = self._state.outlooks.decisions
        return decisions[-1] if decisions else None


def specs(num_devices: int, num_pipelines: int) -> list[PipelineSpec]:
    """Pipelines of different sizes, every second one asynchronous, that fill the cluster."""
    random = Random(num_devices * 1000 + num_pipelines)
    mean = TENANTS_PER_DEVICE * num_devices / num_pipelines
    made = []
    for number in range(num_pipelines):
        num_tenants = max(3, round(mean * random.uniform(0.5, 1.5)))
        num_ranks = min(DEVICES_PER_NODE, num_devices, max(1, num_tenants // 5))
        num_workers = num_tenants - num_ranks
        staleness = number % 2
        made.append(
            PipelineSpec(
                name=f"p{number}",
                mode="async" if staleness else "sync",
                seed=number,
                num_steps=1_000_000,
                groups_per_batch=num_workers * SEQUENCES_PER_WORKER // GROUP_SIZE,
                group_size=GROUP_SIZE,
                min_group_size=2,
                num_rollout_workers=num_workers,
                num_trainer_ranks=num_ranks,
                evaluation=None,
                max_staleness=staleness,
                sample_bound=staleness,
                pipeline_depth=staleness + 1,
            )
        )
    return made


def measure(
    num_devices: int, num_pipelines: int, *, num_decisions: int, cpu_time: bool = False
) -> Measured:
    """Warm up, then watch."""
    per_node = min(DEVICES_PER_NODE, num_devices)
    cluster = Cluster(
        num_nodes=num_devices // per_node,
        devices_per_node=per_node,
        specs=specs(num_devices, num_pipelines),
        policy="jigsaw",
    )
    if cpu_time:
        cluster.timer = time.thread_time
    pipelines = cluster.scheduler.state.pipelines
    cluster.run(lambda: all((p.version or 0) >= WARM_STEPS for p in pipelines.values()))
    gc.collect()
    measured = Measured(cluster)
    cluster.watch = measured
    cluster.run(lambda: len(measured.decisions_s) >= num_decisions)
    return measured


def main() -> None:
    parser = parser_of("scheduler", __doc__)
    parser.add_argument("--rows", help="some of them, as in 8x2,64x8")
    parser.add_argument("--decisions", type=int, default=NUM_DECISIONS, help="measured in each row")
    parser.add_argument(
        "--cpu-time", action="store_true", help="of the thread; else the wall clock"
    )
    options = parser.parse_args()
    say = say_of(options)
    chosen = [
        (devices, pipelines)
        for devices, pipelines in ROWS
        if options.rows is None or f"{devices}x{pipelines}" in options.rows.split(",")
    ]
    gc.disable()
    rows, speeds = [], []
    for devices, pipelines in chosen:
        measured = measure(
            devices, pipelines, num_decisions=options.decisions, cpu_time=options.cpu_time
        )
        rows.append(row(devices, pipelines, measured))
        speeds.append(1 / statistics.fmean(measured.folds_s))
        say(described(rows[-1], measured))
    result = {
        "rows": [msgspec.to_builtins(one) for one in rows],
        "events_per_s": round(min(speeds)),
        "growth_exponent": round(exponent(rows), 3),
    }
    print(json.dumps(result), flush=True)


def row(devices: int, pipelines: int, measured: Measured) -> Row:
    """In milliseconds."""
    taken_ms = [seconds * 1e3 for seconds in measured.decisions_s]
    return Row(
        devices=devices,
        pipelines=pipelines,
        mean_ms=round(statistics.fmean(taken_ms), 3),
        p50_ms=round(statistics.median(taken_ms), 3),
        p99_ms=round(percentile(taken_ms, 0.99), 3),
    )


def described(row: Row, measured: Measured) -> str:
    """For people."""
    folds, passes = measured.folds_s, measured.passes_s
    everything_s = sum(folds) + sum(passes) + sum(measured.decisions_s)
    num_events = len(folds) + len(passes) + len(measured.decisions_s)
    lines = [
        f"{row.devices} devices, {row.pipelines} pipelines: decision mean {row.mean_ms:.2f} ms,"
        f" p50 {row.p50_ms:.2f}, p99 {row.p99_ms:.2f}",
        f"  {len(measured.decisions_s)} decisions, {measured.num_planned} of them plans of a step, the"
        f" others of {min(measured.num_candidates, default=0)} candidates at least,"
        f" {statistics.fmean(measured.num_candidates or [0]):.1f} on average,"
        f" {statistics.fmean(measured.num_expanded or [0]):.0f} nodes expanded",
        f"  {len(passes)} decision passes with one thing to do:"
        f" mean {statistics.fmean(passes or [0.0]) * 1e3:.2f} ms,"
        f" p99 {percentile(passes or [0.0], 0.99) * 1e3:.2f}",
        f"  {num_events} events: {statistics.fmean(folds) * 1e6:.0f} us each between passes"
        f" (p99 {percentile(folds, 0.99) * 1e6:.0f}), {everything_s / num_events * 1e6:.0f} us each"
        " with all passes and decisions",
    ]
    return "\n".join(lines)


def percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least this fraction is within."""
    return sorted(values)[max(0, math.ceil(fraction * len(values)) - 1)]


def exponent(rows: list[Row]) -> float:
    """Slope of log mean decision time over log devices; 0 where all have the same devices."""
    points = [(math.log(one.devices), math.log(one.mean_ms)) for one in rows]
    mean_x, mean_y = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    width = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / width if width else 0.0


if __name__ == "__main__":
    main()
