"""A cluster's status as text: a line per pipeline, or one pipeline in full.

Called by `cluster`; a function of the last `Status`, nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jigsawrl.cli.summary import fates_text, tokens_per_s
from jigsawrl.clocks import skew_text
from jigsawrl.contract.requests import NodeStatus, PipelineStatus, Status, WorkerStatus

TITLES = ("PIPELINE", "STATE", "STEP", "REWARD", "TOKENS/S", "STALENESS", "WAITS FOR")

NODE_TITLES = ("NODE", "STATE", "DEVICES", "HEARD")

WORKER_TITLES = ("WORKER", "DEVICE", "SHARE", "STATE", "VERSION", "HOLDS")

UNKNOWN = "-"


def overview(status: Status) -> Iterator[str]:
    """A line per pipeline, whose last column is its error where it failed, and a line per node."""
    if status.pipelines:
        yield from table(TITLES, [_row(pipeline) for pipeline in status.pipelines])
    else:
        yield "no pipelines: jigsaw submit PIPELINE.toml"
    yield from _nodes(status)
    if status.num_dead_letters:
        yield f"dead letters: {status.num_dead_letters}"


def _nodes(status: Status) -> Iterator[str]:
    """All that are there or should be, and what is wrong with them."""
    shown = [node for node in status.nodes if node.state != "left"]
    if shown:
        yield ""
        yield from table(NODE_TITLES, [_node_row(node) for node in shown])
    for node in status.nodes:
        if node.state == "refused":
            yield f"node refused: {node.refused}"
        skew = skew_text(node.node, node.clock_skew_s)
        if skew is not None and node.state in ("up", "refused"):
            yield skew


def _node_row(node: NodeStatus) -> tuple[str, ...]:
    return (
        node.node,
        node.state,
        ", ".join(node.devices) or "none",
        f"{node.silent_s:.0f} s ago",
    )


def describe_pipeline(pipeline: PipelineStatus) -> Iterator[str]:
    """All there is to say of one."""
    yield f"{pipeline.pipeline}: {state_of(pipeline)}"
    yield f"  step: {pipeline.version} of {pipeline.num_steps} (incarnation {pipeline.incarnation})"
    for name in ("reward_mean", "loss", "staleness_total_mean", "staleness_total_max"):
        if name in pipeline.metrics:
            yield f"  {name}: {pipeline.metrics[name]:.4g}"
    yield f"  tokens/s: {tokens_per_s(pipeline):.0f}, over {pipeline.running_s:.0f} s"
    for evaluation in pipeline.evaluations:
        yield f"  held-out accuracy of version {evaluation.version}: {evaluation.accuracy:.3f}"
    yield f"  groups: {fates_text(pipeline.groups, state=pipeline.state)}"
    yield f"  sequences: {fates_text(pipeline.sequences, state=pipeline.state)}"
    for cause in pipeline.waiting_for:
        yield f"  waits for {cause}"
    if pipeline.failure:
        yield f"  last error: {pipeline.failure}"
    if pipeline.workers and not has_ended(pipeline):
        yield from table(WORKER_TITLES, [_worker_row(worker) for worker in pipeline.workers])


def state_of(pipeline: PipelineStatus) -> str:
    """``running``, or ``paused`` where its user said so."""
    return "paused" if pipeline.paused and not has_ended(pipeline) else pipeline.state


def has_ended(pipeline: PipelineStatus) -> bool:
    """Its workers are the ones that it had: their processes are gone."""
    return pipeline.state in ("finished", "failed")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    for row in (titles, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def _row(pipeline: PipelineStatus) -> tuple[str, ...]:
    waits = pipeline.waiting_for
    more = f"; {len(waits) - 1} more" if len(waits) > 1 else ""
    return (
        pipeline.pipeline,
        state_of(pipeline),
        f"{pipeline.version}/{pipeline.num_steps}",
        _metric(pipeline, "reward_mean"),
        f"{tokens_per_s(pipeline):.0f}",
        _metric(pipeline, "staleness_total_mean"),
        pipeline.failure or (f"{waits[0]}{more}" if waits else ""),
    )


def _metric(pipeline: PipelineStatus, name: str) -> str:
    value = pipeline.metrics.get(name)
    return UNKNOWN if value is None else f"{value:.3g}"


def _worker_row(worker: WorkerStatus) -> tuple[str, ...]:
    return (
        f"  {worker.worker}",
        worker.device or UNKNOWN,
        UNKNOWN if worker.share is None else f"{worker.share:.0%}",
        worker.state,
        UNKNOWN if worker.version is None else str(worker.version),
        str(worker.num_held or ""),
    )
