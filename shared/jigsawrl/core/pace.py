"""How far a pipeline with a latency cap is behind its time alone: what its cap is measured by.

`history` tells when a version is published; the policy `jigsaw` asks `terms`. A step's time alone is
that of its predicted sub-stages, played without the other pipelines on the devices that they have; the
first steps, of which nothing is known when they end, count with the first estimate there is. Pipelines
without a cap cost nothing here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from jigsawrl.core.graph import DeviceBudget, Graph, Node
from jigsawrl.core.lookahead import Terms
from jigsawrl.core.play import Position, play
from jigsawrl.core.prediction import HORIZON_STEPS, Outlook, predict
from jigsawrl.core.slowdown import SlowdownTable
from jigsawrl.core.splits import critical_path_first
from jigsawrl.core.state import Pipeline

RESERVE = 0.95
"""Of a cap is used before a pipeline precedes others of its priority: as much as predictions err."""

ALONE = critical_path_first()


def step_ended(pipeline: Pipeline, *, now_s: float, table: SlowdownTable) -> None:
    """A new version is published: the step that made it has ended, and the next begins."""
    pace = pipeline.pace
    began_s, pace.since_s = pace.since_s, now_s
    if began_s is None or pipeline.spec.terms.max_slowdown is None:
        return
    pace.elapsed_s += now_s - began_s
    pace.num_unknown += 1
    # What one step more adds: where batches overlap, that is less than a step's own path.
    two_s, three_s = (_steps_alone_s(pipeline, num, table) for num in (2, 3))
    pace.step_alone_s = three_s - two_s
    pace.ahead_alone_s = _steps_alone_s(
        pipeline, HORIZON_STEPS, table, last_version=pipeline.spec.num_steps
    )
    if pace.step_alone_s > 0:
        pace.alone_s += pace.num_unknown * pace.step_alone_s
        pace.num_unknown = 0


def begin_again(pipeline: Pipeline, *, now_s: float) -> None:
    """A rollback: what was under way is void, and the time without a trainer is no one's fault."""
    if pipeline.pace.since_s is not None:
        pipeline.pace.since_s = now_s


def terms(
    pipeline: Pipeline, left: Collection[Node], *, now_s: float, table: SlowdownTable
) -> Terms:
    """What the look-ahead has to keep of a pipeline of which `left` is predicted."""
    asked, pace = pipeline.spec.terms, pipeline.pace
    plain = Terms(weight=asked.weight, priority=asked.priority)
    known = pace.since_s is not None and pace.step_alone_s > 0
    if asked.max_slowdown is None or not known:
        return plain
    assert pace.since_s is not None
    left_s = alone_s(left, table)
    done_s = pace.ahead_alone_s - left_s
    return Terms(
        weight=asked.weight,
        priority=asked.priority,
        max_slowdown=asked.max_slowdown,
        elapsed_s=pace.elapsed_s + now_s - pace.since_s,
        alone_elapsed_s=pace.alone_s + max(0.0, done_s),
        alone_left_s=left_s,
    )


def late(promised: Terms) -> bool:
    """Whether it has used up its cap so far, but for a reserve."""
    cap, done_s = promised.max_slowdown, promised.alone_elapsed_s
    return cap is not None and promised.elapsed_s > RESERVE * cap * done_s


def alone_s(nodes: Iterable[Node], table: SlowdownTable) -> float:
    """Time for `nodes` with nobody else on their devices."""
    given = list(nodes)
    names = {node.device for node in given} | {d for node in given for d in node.movable_to}
    devices = [DeviceBudget(id=name) for name in sorted(name for name in names if name is not None)]
    position = Position(Graph(given, devices=devices), table, max_hold_s=float("inf"))
    play(position, policy=ALONE)
    return position.now_s


def _steps_alone_s(
    pipeline: Pipeline, num_steps: int, table: SlowdownTable, *, last_version: int | None = None
) -> float:
    """Of the next steps, as far as nothing of them is done."""
    assert pipeline.version is not None
    outlook = Outlook(
        pipeline=pipeline.name,
        version=pipeline.version,
        num_steps=num_steps,
        max_staleness=pipeline.spec.max_staleness,
        last_version=last_version,
    )
    return alone_s(predict(pipeline.work, outlook), table)
