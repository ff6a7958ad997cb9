"""The Sub-Stage Graph: the work ahead of some pipelines, as nodes with dependencies.

`prediction` builds nodes, a policy joins those of several pipelines into a `Graph`, `play` plays it
forward, `lookahead` chooses on it. The graph is never changed: what has been done so far is a
`play.Position`.

Source: JigsawRL (arXiv 2604.23838), Sub-Stage Graph. Deviations: a node carries full-speed work, and
its duration follows from the share and the co-runners by the slowdown table, instead of one predicted
duration per resource budget; waits for tools and rewards are nodes without a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

import msgspec

from jigsawrl.core.slowdown import WITHOUT_DEVICE, NodeKind


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One sub-stage of one pipeline's step on one device."""

    id: str
    """Unique in a graph: ``<pipeline>/v<version>/<tenant>/<kind>``."""
    pipeline: str
    version: int
    """The step that it belongs to: the one that turns this version into the next."""
    kind: NodeKind
    device: str | None
    """None for waits and barriers, which need none."""
    work_s: float
    """Seconds that are left of it, alone on the device at share 1."""
    memory_bytes: int = 0
    """Held on the device from its start to its end, also while its share is 0."""
    after: tuple[str, ...] = ()
    """Ids of nodes that end before it starts."""
    movable_to: tuple[str, ...] = ()
    """Other devices that can take it over (merging of tails); empty = it stays."""
    move_s: float = 0.0
    """Work that a move adds: prefill of prompt and tokens so far at the target."""


class DeviceBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A device that nodes run on. Its shares sum to at most 1."""

    id: str
    memory_bytes: int | None = None
    """What resident tenants leave for nodes; None = not counted."""


class Graph:
    """Nodes in topological order (`nodes`), with what play and search look up by place in it."""

    def __init__(self, nodes: Iterable[Node], *, devices: Iterable[DeviceBudget]) -> None:
        """ValueError names the node whose id is taken, whose dependency or device is unknown, that
        stands in a cycle, or that fits on no device."""
        given = list(nodes)
        self.devices = tuple(devices)
        self.device_index = {device.id: place for place, device in enumerate(self.devices)}
        _check_ids(given, self.device_index)
        self.nodes = _topological(given)
        self.index = {node.id: place for place, node in enumerate(self.nodes)}
        for node in self.nodes:
            if node.memory_bytes:
                self._check_memory(node)
        self.predecessors = [
            [self.index[id] for id in dict.fromkeys(node.after)] for node in self.nodes
        ]
        self.successors: list[list[int]] = [[] for _ in self.nodes]
        for place, before in enumerate(self.predecessors):
            for other in before:
                self.successors[other].append(place)
        self.lanes = _lanes(self.nodes)
        """By node: its own place, or that of the first tail of its pipeline and step."""
        self.rest_s = [0.0] * len(self.nodes)
        """Longest path behind a node, itself not counted, in full-speed seconds."""
        for place in reversed(range(len(self.nodes))):
            for successor in self.successors[place]:
                path_s = self.nodes[successor].work_s + self.rest_s[successor]
                self.rest_s[place] = max(self.rest_s[place], path_s)
        self.pipelines = tuple(dict.fromkeys(node.pipeline for node in self.nodes))

        total_bytes = dict.fromkeys(self.device_index, 0)
        for node in self.nodes:
            if node.memory_bytes and node.device is not None:
                for name in (node.device, *node.movable_to):
                    total_bytes[name] += node.memory_bytes
        self.is_tight = [
            device.memory_bytes is not None and total_bytes[device.id] > device.memory_bytes
            for device in self.devices
        ]
        """By device: its nodes would not all fit at once, so that a start can be in another's way."""

    def _check_memory(self, node: Node) -> None:
        for name in (node.device, *node.movable_to):
            if name is None:
                continue
            budget = self.devices[self.device_index[name]].memory_bytes
            if budget is not None and node.memory_bytes > budget:
                raise ValueError(
                    f"node {node.id}: needs {node.memory_bytes} bytes on {name}, which has"
                    f" {budget}: place it on another device or make its batch smaller"
                )

    def ready(self, ended: Collection[str]) -> tuple[Node, ...]:
        """Nodes not ended whose dependencies all are."""
        if not ended:
            return tuple(node for node in self.nodes if not node.after)
        return tuple(
            node
            for node in self.nodes
            if node.id not in ended and all(before in ended for before in node.after)
        )

    def critical_path(self) -> tuple[Node, ...]:
        """The longest chain of dependent work; of several, the first in graph order."""
        path: list[Node] = []
        candidates: Iterable[int] = range(len(self.nodes))
        while candidates:
            place = max(candidates, key=lambda i: (self.nodes[i].work_s + self.rest_s[i], -i))
            path.append(self.nodes[place])
            candidates = self.successors[place]
        return tuple(path)

    def critical_path_s(self) -> float:
        """Work on the critical path: no schedule ends earlier, as no speed exceeds 1."""
        return sum(node.work_s for node in self.critical_path())

    def device_work_s(self) -> dict[str, float]:
        """Full-speed seconds of work on each device, where nothing moves."""
        total = {device.id: 0.0 for device in self.devices}
        for node in self.nodes:
            if node.device is not None:
                total[node.device] += node.work_s
        return total

    def lower_bound_s(self, *, capacity: float = 1.0) -> float:
        """No schedule has a smaller makespan: max(critical path, work of a device / capacity), with
        `capacity` of the slowdown table. Tails count once per pipeline and step, since they can run
        in one batch, and movable ones not at all."""
        bound_s = 0.0
        for device in self.devices:
            work_s, tails = 0.0, dict[tuple[str, int], float]()
            for node in self.nodes:
                if node.device != device.id or node.movable_to:
                    continue
                if node.kind == "tail_decode":
                    key = (node.pipeline, node.version)
                    tails[key] = max(tails.get(key, 0.0), node.work_s)
                else:
                    work_s += node.work_s
            bound_s = max(bound_s, (work_s + sum(tails.values())) / capacity)
        return max(bound_s, self.critical_path_s())


def _check_ids(nodes: list[Node], devices: Collection[str]) -> None:
    ids = {node.id for node in nodes}
    if len(ids) < len(nodes):
        twice = min(id for id, count in Counter(node.id for node in nodes).items() if count > 1)
        raise ValueError(f"node {twice}: the id is taken: give every node its own")
    for node in nodes:
        unknown = [id for id in node.after if id not in ids]
        if unknown:
            raise ValueError(f"node {node.id}: comes after unknown node {unknown[0]}: add it")
        if (node.device is None) != (node.kind in WITHOUT_DEVICE):
            raise ValueError(f"node {node.id}: waits, and only waits, have no device")
        if not 0 <= node.work_s < float("inf") or not 0 <= node.move_s < float("inf"):
            raise ValueError(f"node {node.id}: work is finite and not negative: {node.work_s}")
        if node.movable_to and node.kind != "tail_decode":
            raise ValueError(f"node {node.id}: only tail decode moves: clear movable_to")
        for name in (node.device, *node.movable_to):
            if name is not None and name not in devices:
                raise ValueError(f"node {node.id}: on unknown device {name}: add it")


def _topological(nodes: list[Node]) -> tuple[Node, ...]:
    """As given where dependencies allow it (Kahn)."""
    by_id = {node.id: node for node in nodes}
    missing = {node.id: len(set(node.after)) for node in nodes}
    followers: dict[str, list[str]] = {node.id: [] for node in nodes}
    for node in nodes:
        for before in dict.fromkeys(node.after):
            followers[before].append(node.id)
    ordered = [node.id for node in nodes if not node.after]
    for id in ordered:  # grows while it is walked
        for follower in followers[id]:
            missing[follower] -= 1
            if not missing[follower]:
                ordered.append(follower)
    if len(ordered) < len(nodes):
        stuck = next(node.id for node in nodes if missing[node.id])
        raise ValueError(f"node {stuck}: waits for itself through a cycle: break the cycle")
    return tuple(by_id[id] for id in ordered)


def _lanes(nodes: tuple[Node, ...]) -> list[int]:
    first: dict[tuple[str, int], int] = {}
    return [
        first.setdefault((node.pipeline, node.version), place)
        if node.kind == "tail_decode"
        else place
        for place, node in enumerate(nodes)
    ]
