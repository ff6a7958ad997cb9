"""``python -m services.scheduler.graph STATE_DIR [--html FILE]``: the Sub-Stage Graph of a run.

Predicts the next two steps of every pipeline from what its last ones cost, as the policy `jigsaw` would
see them at the last recorded event; of a pipeline that has ended, the steps that would follow. Prints
nodes, what is ready, the critical path and the lower bound, and draws the list schedule as HTML.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator
from pathlib import Path

from jigsawrl.core import phases, profiles
from jigsawrl.core.graph import DeviceBudget, Graph
from jigsawrl.core.play import Position, play
from jigsawrl.core.policies.jigsaw import MAX_HOLD_S
from jigsawrl.core.prediction import Outlook, predict
from jigsawrl.core.slowdown import LEVELS, SlowdownTable
from jigsawrl.core.splits import critical_path_first
from jigsawrl.core.state import State
from jigsawrl.core.timeline import Played
from services.scheduler.recorded import last_state, print_lines

COLORS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")
ROW_PX, WIDTH_PX, LABEL_PX = 26, 1000, 160


def graph_of(state: State) -> Graph:
    """Raises ValueError where nothing can be predicted yet."""
    nodes = [
        node
        for pipeline in state.pipelines.values()
        if pipeline.version is not None
        for node in predict(
            pipeline.work,
            Outlook(
                pipeline=pipeline.name,
                version=pipeline.version,
                max_staleness=pipeline.spec.max_staleness,
                # Of a run that is over, it is told what a step was like.
                last_version=pipeline.spec.num_steps if pipeline.active else None,
                ended=phases.Ended(pipeline) if pipeline.active else frozenset(),
                generating=pipeline.num_generating,
            ),
        )
    ]
    if not nodes:
        raise ValueError("nothing is predicted yet: a pipeline must have trained a step")
    devices = sorted({node.device for node in nodes if node.device is not None})
    return Graph(nodes, devices=[DeviceBudget(id=device) for device in devices])


def played(graph: Graph, table: SlowdownTable) -> Played:
    """By the list schedule, with what each node ran when."""
    position = Position(graph, table, max_hold_s=MAX_HOLD_S, record=True)
    play(position, policy=critical_path_first(LEVELS))
    return position.played()


def describe(graph: Graph, table: SlowdownTable) -> Iterator[str]:
    """Lines for people."""
    for node in graph.nodes:
        after = ", ".join(node.after) or "nothing"
        yield f"{node.id}: {node.work_s:.3f} s on {node.device or 'no device'}, after {after}"
    yield "ready: " + ", ".join(node.id for node in graph.ready(()))
    yield f"critical path, {graph.critical_path_s():.2f} s:"
    yield "  " + " -> ".join(node.id for node in graph.critical_path())
    for device, work_s in graph.device_work_s().items():
        yield f"work on {device}: {work_s:.2f} s"
    bound_s, makespan_s = (
        graph.lower_bound_s(capacity=table.capacity),
        played(graph, table).makespan_s,
    )
    yield f"no schedule ends before {bound_s:.2f} s; the list schedule ends at {makespan_s:.2f} s"


def picture(graph: Graph, table: SlowdownTable) -> str:
    """A self-contained page: one row per device, one bar per stretch of a node at one share."""
    done = played(graph, table)
    rows = {device.id: row for row, device in enumerate(graph.devices)}
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(graph.pipelines)}
    scale = WIDTH_PX / max(done.makespan_s, 1e-9)
    parts = [
        f'<text x="4" y="{row * ROW_PX + 17}">{html.escape(device)}</text>'
        for device, row in rows.items()
    ]
    offsets: dict[tuple[int, float], float] = {}
    for span in done.timeline:
        if span.device is None or span.share <= 0:
            continue
        row, height = rows[span.device], span.share * (ROW_PX - 4)
        top = offsets.get((row, span.start_s), 0.0)
        offsets[row, span.start_s] = top + height
        x, width = LABEL_PX + span.start_s * scale, (span.end_s - span.start_s) * scale
        color = colors[span.node.partition("/")[0]]
        label = html.escape(f"{span.node}: {span.end_s - span.start_s:.3f} s, share {span.share:g}")
        parts.append(
            f'<rect x="{x:.1f}" y="{row * ROW_PX + 2 + top:.1f}" width="{max(width, 0.5):.1f}"'
            f' height="{height:.1f}" fill="{color}" stroke="#fff"><title>{label}</title></rect>'
        )
    legend = " ".join(
        f'<span style="color:{color}">&#9632;</span> {html.escape(name)}'
        for name, color in colors.items()
    )
    text = html.escape("\n".join(describe(graph, table)))
    size = f'width="{LABEL_PX + WIDTH_PX}" height="{len(rows) * ROW_PX}"'
    return (
        '<!doctype html><meta charset="utf-8"><title>Sub-Stage Graph</title>'
        f"<h1>The next steps, {done.makespan_s:.2f} s</h1><p>{legend}</p>"
        f'<svg {size} font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
        f"<pre>{text}</pre>\n"
    )


def main() -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler.graph")
    parser.add_argument("folder", type=Path, metavar="STATE_DIR", help="RUN/scheduler of a run")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also as a picture")
    arguments = parser.parse_args()
    try:
        state = last_state(arguments.folder)
        graph, table = graph_of(state), profiles.table(state)
        print_lines(describe(graph, table))
        if arguments.html is not None:
            arguments.html.write_text(picture(graph, table))
    except (OSError, ValueError) as error:
        print(f"jigsaw graph: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
