"""One whole run of the system on this machine, and what its recorded events say of it.

Called by the benchmarks that compare policies and modes. Nothing is asked of the run itself: times are
those of the messages on its event stream, so that every policy is measured by the same clock.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.contract.codec import EVENTS, UndecodableError
from jigsawrl.contract.events import (
    Event,
    SubStagesEnded,
    VersionPublished,
    WeightsLoaded,
    WorkerReady,
)
from jigsawrl.contract.parts import SubStage
from jigsawrl.core.work_history import median_error
from services.scheduler.recorded import last_state
from services.scheduler.segments import read_segments

TIMEOUT_S = 600.0


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run; seconds."""

    makespan_s: float
    """From the moment when all processes were warm to the last version of the last pipeline."""
    finish_s: dict[str, float]
    """By pipeline, from that moment to its last version."""
    step_s: dict[str, list[float]]
    """By pipeline, of each step: from version to version, the first from its first work."""
    gap_s: float
    """Longest time between the last version of one pipeline and the first work of the next one, where
    that came after it."""
    busy_s: float
    """Core seconds that sub-stages computed for, summed over devices; not those of transfers, the bus
    and the other services, which run on the same cores."""
    num_devices: int
    wait_fraction: dict[str, float]
    """By pipeline: of the time from its first work to its last version, that in which a rollout worker
    only waited for its environment, mean over workers."""
    cpu_s: float
    """Of all processes of the run, starts included."""
    num_migrations: dict[str, int]
    num_gathered: dict[str, int]
    """By pipeline: steps that fewer than all of its rollout workers generated."""
    num_tokens_again: int
    prediction_error: float | None
    """Median of |predicted - observed| / observed, of sub-stages in the core seconds that they take."""
    num_trained_tokens: int
    trained_tokens_per_s: dict[str, float]

    @property
    def idle_fraction(self) -> float:
        """Of the devices' time until the end."""
        return max(0.0, 1 - self.busy_s / (self.makespan_s * self.num_devices))


def run(
    pipelines: Sequence[Path],
    *,
    folder: Path,
    policy: str | None = None,
    changes: Iterable[str] = (),
) -> Measured:
    """Run them to their ends, all files below `folder`; raises SystemExit where that failed."""
    command = [sys.executable, "-m", "jigsawrl.cli.main", "run", *map(str, pipelines)]
    command += ["--runs-folder", str(folder), "--start-together"]
    if policy is not None:
        command += ["--policy", policy]
    for change in changes:
        command += ["--set", change]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"a run did not end in {TIMEOUT_S:.0f} s; its files: {folder}") from None
    if done.returncode != 0:
        raise SystemExit(f"a run failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime - before.ru_utime - before.ru_stime
    summary = json.loads(done.stdout.splitlines()[-1])
    return measure(Path(summary["run"]), summary, cpu_s=cpu_s)


def measure(run_folder: Path, summary: dict[str, Any], *, cpu_s: float) -> Measured:
    """From the summary and the events of a run that ended well."""
    pipelines = summary["pipelines"]
    ready_s: dict[str, float] = {}
    published: dict[str, dict[int, float]] = {name: {} for name in pipelines}
    spans: list[tuple[str, str, SubStage]] = []
    for timestamp_s, event in _events(run_folder / "scheduler" / "events"):
        if event.pipeline is None:
            continue
        if isinstance(event, WorkerReady):
            if event.worker.id in ready_s:
                raise SystemExit(f"{event.worker.id} was started again: this run was disturbed")
            ready_s[event.worker.id] = timestamp_s
        elif isinstance(event, WeightsLoaded) and event.version == 0:
            ready_s[event.worker.id] = max(ready_s[event.worker.id], timestamp_s)
        elif isinstance(event, VersionPublished):
            published[event.pipeline].setdefault(event.version, timestamp_s)
        elif isinstance(event, SubStagesEnded):
            spans += [(event.pipeline, event.worker.id, span) for span in event.spans]
    warm_s = max(ready_s.values())
    finish_s = {name: max(at.values()) - warm_s for name, at in published.items()}
    begin_s = {
        name: min(s.started_s for p, _, s in spans if p == name and s.kind == "prefill") - warm_s
        for name in pipelines
    }
    state = last_state(run_folder / "scheduler")
    errors = [pair for p in state.pipelines.values() for pair in p.errors]
    working = {t.device for p in state.pipelines.values() for t in p.tenants.values()} - {None}
    return Measured(
        makespan_s=max(finish_s.values()),
        finish_s=finish_s,
        step_s={
            name: _steps_s(begin_s[name] + warm_s, published[name].values()) for name in pipelines
        },
        gap_s=_longest_gap(begin_s, finish_s),
        busy_s=sum(span.cpu_s or 0.0 for _, _, span in spans if span.started_s >= warm_s),
        num_devices=len(working),
        wait_fraction={
            name: _wait_s(name, spans) / (finish_s[name] - begin_s[name]) for name in pipelines
        },
        cpu_s=cpu_s,
        num_migrations={name: p["num_migrations"] for name, p in pipelines.items()},
        num_gathered={
            name: _num_gathered(
                name, spans, num_workers=sum(w.startswith(f"{name}.rollout") for w in ready_s)
            )
            for name in pipelines
        },
        num_tokens_again=sum(p["num_tokens_again"] for p in pipelines.values()),
        prediction_error=median_error(errors),
        num_trained_tokens=sum(p.num_trained_tokens for p in state.pipelines.values()),
        trained_tokens_per_s={name: p["tokens_per_s"] for name, p in pipelines.items()},
    )


def _events(folder: Path) -> Iterable[tuple[float, Event]]:
    for entry in read_segments(folder):
        try:
            yield entry.timestamp_s, EVENTS.decode(entry.payload)
        except UndecodableError:
            continue


def _longest_gap(begin_s: dict[str, float], finish_s: dict[str, float]) -> float:
    """Between neighbours in order of beginning."""
    order = sorted(begin_s, key=lambda name: begin_s[name])
    pairs = itertools.pairwise(order)
    return max((begin_s[after] - finish_s[before] for before, after in pairs), default=0.0)


def _steps_s(begin_s: float, published_s: Iterable[float]) -> list[float]:
    """The weights that a pipeline begins with end no step."""
    ends_s = [begin_s, *sorted(published_s)[1:]]
    return [after - before for before, after in itertools.pairwise(ends_s)]


def _num_gathered(name: str, spans: list[tuple[str, str, SubStage]], *, num_workers: int) -> int:
    workers: dict[int, set[str]] = {}
    for pipeline, worker, span in spans:
        if pipeline == name and span.kind in ("bulk_decode", "tail_decode"):
            workers.setdefault(span.version, set()).add(worker)
    return sum(len(step) < num_workers for step in workers.values())


def _wait_s(name: str, spans: list[tuple[str, str, SubStage]]) -> float:
    """Mean over a pipeline's rollout workers of the time in which they only waited."""
    waits: dict[str, float] = {}
    for pipeline, worker, span in spans:
        if pipeline == name and ".rollout" in worker:
            waited_s = span.duration_s if span.kind == "tool_wait" else 0.0
            waits[worker] = waits.get(worker, 0.0) + waited_s
    return sum(waits.values()) / len(waits) if waits else 0.0
