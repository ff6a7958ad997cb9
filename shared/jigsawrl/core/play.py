"""Plays a Sub-Stage Graph forward under given shares: event-driven processor sharing.

`lookahead` judges candidate actions with it; a test or `jigsaw graph` can play any policy. Between two
events every running node progresses at the speed that the slowdown table gives for its share and its
co-runners. A device's shares are decided anew when a node on it becomes ready, ends or has been held
too long; those of other devices stay. Nothing here is random, and ties go by graph order.

A lane is what has a share: one node, or all tails of one pipeline and step on one device, which run
as one batch. So moving a tail to another worker of its pipeline costs that worker `BATCH_COST` and
the prefill, and frees the device that it leaves (JigsawRL's sub-stage merging).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from heapq import heappop, heappush

from jigsawrl.core.graph import Graph
from jigsawrl.core.slowdown import Running, SlowdownTable
from jigsawrl.core.timeline import Played, Span

BATCH_COST = 1.2
"""An iteration over several tails costs at most this times one over a single sequence: that is how
`jigsaw profile` cuts the tail from bulk decode."""

SAME_MOMENT_S = 1e-9
"""Events this near are one decision point: what lies between them is rounding."""

_OVER = 1 + 1e-6

_COPIED = (
    *("left_s", "since_s", "speed", "share", "held_s", "started", "device", "missing", "events"),
    *("finish_s", "stamp", "pipeline_finish_s", "used_bytes", "work_s"),
)

Move = tuple[int, int]
"""A node and the device that it moves to."""

Shares = Mapping[int, float]
"""Share by lane, each above 0; a lane that is absent is held."""


class Position:
    """How far a graph has been played: the working state, copied per candidate.

    Nodes, devices, pipelines and lanes are numbers here: places in `graph`.
    """

    def __init__(
        self,
        graph: Graph,
        table: SlowdownTable,
        *,
        max_hold_s: float,
        started: Collection[str] = (),
        held_s: Mapping[str, float] | None = None,
        shares: Mapping[str, float] | None = None,
        record: bool = False,
    ) -> None:
        """`started`: ids of nodes that hold memory already. `held_s`: how long ready nodes have
        waited so far. `shares`: what is applied now to running nodes. `record`: keep the timeline.
        Every device with a ready node is touched."""
        self.graph, self.table, self.max_hold_s = graph, table, max_hold_s
        self.capacity = table.capacity
        num_nodes, self.now_s = len(graph.nodes), 0.0
        self.num_expanded = 0
        """Nodes that ended: what a search is bounded by."""
        self.left_s = [node.work_s for node in graph.nodes]
        self.since_s = [0.0] * num_nodes
        self.speed = [0.0] * num_nodes
        self.share = [0.0] * num_nodes
        self.held_s = [0.0] * num_nodes
        for id, seconds in (held_s or {}).items():
            self.held_s[graph.index[id]] = seconds
        self.started = [node.id in started for node in graph.nodes]
        waits = len(graph.devices)
        self.device = [
            waits if n.device is None else graph.device_index[n.device] for n in graph.nodes
        ]
        self.lane = graph.lanes
        self.missing = [len(before) for before in graph.predecessors]
        self.finish_s: list[float | None] = [None] * num_nodes
        self.pipeline_finish_s = dict.fromkeys(graph.pipelines, 0.0)
        self.here: list[list[int]] = [[] for _ in range(waits + 1)]
        """Ready and running nodes by device; the last entry: waits."""
        self.used_bytes = [0] * (waits + 1)
        self.is_counted = [n.device is not None and n.kind != "tail_decode" for n in graph.nodes]
        self.work_s = [0.0] * waits
        """By device: work left of its nodes that can't move, as far as it is settled."""
        for node, counted in enumerate(self.is_counted):
            if counted:
                self.work_s[self.device[node]] += self.left_s[node]
        self.stamp = [0] * num_nodes
        self.events: list[tuple[float, int, int]] = []
        """Heap of (when, node, stamp): it ends, or its hold has been too long."""
        self.spans: list[Span] | None = [] if record else None
        self.touched: set[int] = set()
        for node, missing in enumerate(self.missing):
            if self.started[node]:
                assert not missing, "started before what it depends on"
                self.used_bytes[self.device[node]] += graph.nodes[node].memory_bytes
            if not missing:
                self._become_ready(node)
        self._resume(shares or {})

    def _resume(self, shares: Mapping[str, float]) -> None:
        """Apply shares by node id, as they are now."""
        lanes: dict[int, dict[int, float]] = {}
        for id, share in shares.items():
            node = self.graph.index[id]
            if share > 0:
                lanes.setdefault(self.device[node], {})[self.lane[node]] = share
        for device in sorted(lanes):
            self.assign(device, lanes[device])

    def copy(self) -> Position:
        """The same moment, without a timeline."""
        other = Position.__new__(Position)
        other.__dict__.update(self.__dict__)
        other.__dict__.update((name, self.__dict__[name].copy()) for name in _COPIED)
        other.here = [[*nodes] for nodes in self.here]
        other.spans, other.touched = None, set(self.touched)
        return other

    def lanes(self, device: int) -> dict[int, list[int]]:
        """Ready and running nodes of a device by lane."""
        lanes: dict[int, list[int]] = {}
        for node in self.here[device]:
            lanes.setdefault(self.lane[node], []).append(node)
        return lanes

    def need_bytes(self, nodes: list[int]) -> int:
        """Memory that a lane needs to get on: none once a node of it has started."""
        if any(self.started[node] for node in nodes):
            return 0
        return min(self.graph.nodes[node].memory_bytes for node in nodes)

    def free_bytes(self, device: int) -> float:
        """Memory that no started node holds."""
        budget = self.graph.devices[device].memory_bytes
        return float("inf") if budget is None else budget - self.used_bytes[device]

    def path_s(self, node: int) -> float:
        """Longest path from now through this node, in full-speed seconds."""
        left_s = self.left_s[node] - (self.now_s - self.since_s[node]) * self.speed[node]
        return (left_s if left_s > 0 else 0.0) + self.graph.rest_s[node]

    def path_of_s(self, pipeline: str) -> float:
        """Longest path through what is ready of a pipeline: its time alone, from now."""
        nodes = self.graph.nodes
        return max(
            (self.path_s(n) for at in self.here for n in at if nodes[n].pipeline == pipeline),
            default=0.0,
        )

    def estimate_finish_s(self) -> dict[str, float]:
        """When each pipeline ends, were all that is left of it its longest path; exact at the end."""
        finish_s = dict(self.pipeline_finish_s)
        for at in self.here:
            for node in at:
                name = self.graph.nodes[node].pipeline
                finish_s[name] = max(finish_s[name], self.now_s + self.path_s(node))
        return finish_s

    def estimate_makespan_s(self) -> float:
        """When the fullest device ends, working at its capacity; tails, which can merge, are left
        out."""
        latest_s = 0.0
        for left_s, here in zip(self.work_s, self.here[:-1], strict=True):
            for node in here:
                if self.is_counted[node]:
                    left_s -= (self.now_s - self.since_s[node]) * self.speed[node]
            latest_s = max(latest_s, left_s)
        return self.now_s + latest_s / self.capacity

    def overdue(self, node: int) -> bool:
        """Held so long in all that it may not be held again."""
        held_s = self.held_s[node]
        if not self.speed[node]:
            held_s += self.now_s - self.since_s[node]
        return held_s >= self.max_hold_s - SAME_MOMENT_S

    def assign(self, device: int, shares: Shares) -> None:
        """Run lanes of a device at these shares from now on; a lane starts the nodes that fit."""
        if len(shares) == 1 and not self.graph.is_tight[device]:
            self._give_all(device, *next(iter(shares.items())))
            return
        assert sum(shares.values()) <= _OVER, shares
        running: dict[int, list[int]] = {lane: [] for lane in shares}
        starting: list[int] = []
        for node in self.here[device]:
            members = running.get(self.lane[node])
            if members is None and not self.speed[node] and self.stamp[node]:
                continue  # held as before
            self._settle(node)
            if members is None:
                self._hold(node)
            elif self.started[node]:
                members.append(node)
            else:
                starting.append(node)
        if starting:
            self._start(starting, running)
        nodes = self.graph.nodes
        kinds: tuple[Running, ...] = tuple(
            (nodes[running[lane][0]].kind, share) for lane, share in shares.items()
        )
        for (lane, share), speed in zip(shares.items(), self.table.speeds(kinds), strict=True):
            members = running[lane]
            self._run(members, share, speed)

    def _give_all(self, device: int, lane: int, share: float) -> None:
        """`assign` where one lane runs and all have room, as is nearly always so."""
        assert share <= _OVER, share
        members: list[int] = []
        for node in self.here[device]:
            if self.lane[node] == lane:
                self._settle(node)
                if not self.started[node]:
                    self.started[node] = True
                    self.used_bytes[device] += self.graph.nodes[node].memory_bytes
                members.append(node)
            elif self.speed[node] or not self.stamp[node]:
                self._settle(node)
                self._hold(node)
        speed = self.table.speeds(((self.graph.nodes[members[0]].kind, share),))[0]
        self._run(members, share, speed)

    def _run(self, nodes: list[int], share: float, speed: float) -> None:
        """Nodes of one lane."""
        if len(nodes) > 1:
            speed /= BATCH_COST
        for node in nodes:
            self.share[node] = share
            if self.speed[node] != speed:  # otherwise its end stands in `events` already
                self.speed[node] = speed
                self._announce(node, self.now_s + self.left_s[node] / speed)

    def move(self, node: int, device: int) -> None:
        """Send a movable node to another device. Both are touched: give them shares next."""
        source = self.device[node]
        assert self.can_move(node, device)
        self._settle(node)
        self._hold(node)
        self.left_s[node] += self.graph.nodes[node].move_s
        if self.started[node]:
            self.used_bytes[source] -= self.graph.nodes[node].memory_bytes
            self.used_bytes[device] += self.graph.nodes[node].memory_bytes
        self.here[source].remove(node)
        self.here[device].append(node)
        self.here[device].sort()
        self.device[node] = device
        self.touched |= {source, device}

    def can_move(self, node: int, device: int) -> bool:
        """It is ready, may go there, and its memory fits."""
        spec = self.graph.nodes[node]
        return (
            self.device[node] != device
            and node in self.here[self.device[node]]
            and self.graph.devices[device].id in (*spec.movable_to, spec.device)
            and (not self.started[node] or spec.memory_bytes <= self.free_bytes(device))
        )

    def advance(self) -> bool:
        """Go to the next event, which sets `touched`; False when everything has ended."""
        self.touched = set()
        while self.events:
            when_s, node, stamp = self.events[0]
            if stamp != self.stamp[node]:
                heappop(self.events)
                continue
            if self.touched and when_s > self.now_s + SAME_MOMENT_S:
                return True
            heappop(self.events)
            self.now_s = max(self.now_s, when_s)
            if self.speed[node] > 0:
                self._end(node)
            else:
                self.touched.add(self.device[node])
        return bool(self.touched)

    def played(self) -> Played:
        """The result, once everything has ended."""
        finish_s = {
            node.id: end_s
            for node, end_s in zip(self.graph.nodes, self.finish_s, strict=True)
            if end_s is not None
        }
        return Played(
            makespan_s=max(finish_s.values(), default=0.0),
            finish_s=finish_s,
            pipeline_finish_s=dict(self.pipeline_finish_s),
            timeline=tuple(self.spans or ()),
        )

    def _become_ready(self, node: int) -> None:
        device = self.device[node]
        self.here[device].append(node)
        self.since_s[node] = self.now_s
        if device == len(self.graph.devices):
            self.speed[node] = 1.0
            self._announce(node, self.now_s + self.left_s[node])
        else:
            self.touched.add(device)

    def _end(self, node: int) -> None:
        self._settle(node)
        if self.is_counted[node]:
            self.work_s[self.device[node]] -= self.left_s[node]
        self.finish_s[node] = self.now_s
        self.speed[node] = 0.0
        self.stamp[node] += 1
        self.num_expanded += 1
        device, spec = self.device[node], self.graph.nodes[node]
        self.pipeline_finish_s[spec.pipeline] = self.now_s
        self.here[device].remove(node)
        if self.started[node]:
            self.used_bytes[device] -= spec.memory_bytes
        if device < len(self.graph.devices):
            self.touched.add(device)
        for successor in self.graph.successors[node]:
            self.missing[successor] -= 1
            if not self.missing[successor]:
                self._become_ready(successor)

    def _start(self, nodes: list[int], running: dict[int, list[int]]) -> None:
        """Start those that fit and hold the others; one of each lane first, since its mates may not
        take another lane's memory."""
        device, specs = self.device[nodes[0]], self.graph.nodes
        if len(nodes) > 1:
            nodes.sort(key=lambda node: (specs[node].memory_bytes, node))
            firsts = {self.lane[node]: node for node in reversed(nodes)}
            nodes.sort(key=lambda n: firsts[self.lane[n]] != n or bool(running[self.lane[n]]))
        for node in nodes:
            if specs[node].memory_bytes <= self.free_bytes(device):
                self.used_bytes[device] += specs[node].memory_bytes
                self.started[node] = True
                running[self.lane[node]].append(node)
            else:
                self._hold(node)
        assert all(running.values()), "a lane got a share, but fits into no memory"

    def _settle(self, node: int) -> None:
        """Count what the node did or waited since its speed was set."""
        passed_s = self.now_s - self.since_s[node]
        if passed_s <= 0:
            return
        speed = self.speed[node]
        if speed:
            done_s = min(passed_s * speed, self.left_s[node])
            self.left_s[node] -= done_s
            if self.is_counted[node]:
                self.work_s[self.device[node]] -= done_s
            if self.spans is not None:
                self.spans.append(self._span(node))
        else:
            self.held_s[node] += passed_s
        self.since_s[node] = self.now_s

    def _span(self, node: int) -> Span:
        device = self.device[node]
        return Span(
            node=self.graph.nodes[node].id,
            device=None if device == len(self.graph.devices) else self.graph.devices[device].id,
            share=self.share[node],
            start_s=self.since_s[node],
            end_s=self.now_s,
        )

    def _hold(self, node: int) -> None:
        if not self.speed[node] and self.stamp[node]:
            return  # held already: the end of its hold stands in `events`
        self.share[node] = self.speed[node] = 0.0
        self.stamp[node] += 1
        if self.held_s[node] < self.max_hold_s - SAME_MOMENT_S:
            self._announce(node, self.now_s + self.max_hold_s - self.held_s[node])

    def _announce(self, node: int, when_s: float) -> None:
        self.stamp[node] += 1
        if when_s < float("inf"):
            heappush(self.events, (when_s, node, self.stamp[node]))


Policy = Callable[[Position, int], Shares]
"""Shares for one touched device."""


def play(position: Position, *, policy: Policy, max_nodes: int | None = None) -> bool:
    """Play on until everything has ended (True) or `max_nodes` more nodes have (False)."""
    last = None if max_nodes is None else position.num_expanded + max_nodes
    while True:
        for device in sorted(position.touched):
            if position.here[device]:
                position.assign(device, policy(position, device))
        if last is not None and position.num_expanded >= last:
            return not any(position.here)
        if not position.advance():
            assert not any(position.here), "held forever"
            return True
