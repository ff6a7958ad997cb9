"""Small graphs and tables for the tests of play and search."""

from __future__ import annotations

import random
from collections.abc import Iterable

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.graph import DeviceBudget, Graph, Node
from jigsawrl.core.play import Position
from jigsawrl.core.slowdown import CPU_SLOT, SlowdownProfile, SlowdownRow, SlowdownTable
from jigsawrl.core.timeline import Played

CPU = SlowdownTable(CPU_SLOT)

IDEAL = SlowdownTable(SlowdownProfile(device_kind="ideal", source="test", missing_pair_factor=1.0))
"""Speed = share, no interference: numbers in tests stay round."""

GPU = SlowdownTable(
    SlowdownProfile(
        device_kind="gpu",
        source="made up: decode saturates below the whole device",
        rows=(
            SlowdownRow(kind="tail_decode", share=0.5, speed=0.8),
            SlowdownRow(kind="bulk_decode", share=0.5, speed=0.65),
        ),
        missing_pair_factor=0.9,
    )
)

LEVELS = (0.5, 1.0)
"""Few, for exhaustive search."""

KINDS: tuple[SubStageKind, ...] = (
    "prefill",
    "bulk_decode",
    "tail_decode",
    "forward_backward",
    "optimizer",
)


def node(
    id: str,
    device: str | None,
    work_s: float,
    *,
    after: Iterable[str] = (),
    kind: SubStageKind = "prefill",
    memory_bytes: int = 0,
    movable_to: Iterable[str] = (),
    move_s: float = 0.0,
    version: int = 0,
) -> Node:
    """``node("a.1", "d0", 3)``: the pipeline is what stands before the dot."""
    return Node(
        id=id,
        pipeline=id.split(".")[0],
        version=version,
        kind=kind if device is not None else "tool_wait",
        device=device,
        work_s=work_s,
        memory_bytes=memory_bytes,
        after=tuple(after),
        movable_to=tuple(movable_to),
        move_s=move_s,
    )


def graph(*nodes: Node, memory_bytes: int | None = None) -> Graph:
    """With the devices that the nodes name."""
    names = {name for n in nodes for name in (n.device, *n.movable_to) if name is not None}
    return Graph(
        nodes, devices=[DeviceBudget(id=name, memory_bytes=memory_bytes) for name in sorted(names)]
    )


def position(
    of: Graph, table: SlowdownTable = IDEAL, *, max_hold_s: float = 1e6, record: bool = False
) -> Position:
    """At the start."""
    return Position(of, table, max_hold_s=max_hold_s, record=record)


def random_graph(seed: int, *, max_nodes: int = 4, memory_bytes: int = 10) -> Graph:
    """Two or three pipelines on two devices, with waits, memory and tails that can move."""
    draw = random.Random(seed)
    nodes: list[Node] = []
    num_pipelines = draw.randint(2, 3)
    for pipeline in range(num_pipelines):
        ids: list[str] = []
        for number in range(draw.randint(1, max_nodes + 1 - num_pipelines + 1)):
            kind = draw.choice(KINDS)
            waits = draw.random() < 0.1
            device = draw.randrange(2)
            movable = kind == "tail_decode" and not waits and draw.random() < 0.5
            nodes.append(
                node(
                    f"p{pipeline}.{number}",
                    None if waits else f"d{device}",
                    draw.randint(1, 10),
                    after=[id for id in ids if draw.random() < 0.5],
                    kind=kind,
                    memory_bytes=0 if waits else draw.choice((0, 0, 3, 6)),
                    movable_to=[f"d{1 - device}"] if movable else [],
                    move_s=0.5 if movable else 0.0,
                )
            )
            ids.append(nodes[-1].id)
    devices = [DeviceBudget(id=f"d{i}", memory_bytes=memory_bytes) for i in range(2)]
    return Graph(nodes, devices=devices)


def check(of: Graph, played: Played, *, capacity: float) -> None:
    """What every play must hold: all ends, in order, within shares and memory, no sooner than the
    lower bound."""
    assert set(played.finish_s) == {n.id for n in of.nodes}
    started: dict[str, float] = {}
    for span in played.timeline:
        started.setdefault(span.node, span.start_s)
    for n in of.nodes:
        start_s = started.get(n.id, played.finish_s[n.id])
        assert all(played.finish_s[before] <= start_s + 1e-6 for before in n.after)
    by_id = {n.id: n for n in of.nodes}
    for moment_s in sorted({span.start_s for span in played.timeline}):
        at_s = moment_s + 2e-6
        running: dict[str, dict[object, float]] = {}
        for span in played.timeline:
            if span.device is not None and span.start_s <= at_s < span.end_s:
                n = by_id[span.node]
                batch = (n.pipeline, n.version) if n.kind == "tail_decode" else n.id
                running.setdefault(span.device, {})[batch] = span.share
        assert all(sum(shares.values()) <= 1 + 1e-6 for shares in running.values())
        for device in of.devices:
            used_bytes = sum(n.memory_bytes for n in of.nodes if _holds(played, n, device.id, at_s))
            assert device.memory_bytes is None or used_bytes <= device.memory_bytes
    assert played.makespan_s >= of.lower_bound_s(capacity=capacity) - 1e-6


def _holds(played: Played, n: Node, device: str, at_s: float) -> bool:
    """It has run there and has neither ended nor moved away."""
    spans = [span for span in played.timeline if span.node == n.id]
    past = [span for span in spans if span.start_s <= at_s]
    if not past or past[-1].device != device or at_s >= played.finish_s[n.id]:
        return False
    coming = spans[len(past) :]
    return at_s < past[-1].end_s or not coming or coming[0].device == device
