"""Chooses shares, holds and moves at a decision point by playing candidates forward.

Called by the policy `jigsaw` with the graph of the devices touched since the last decision. Starting
from the list schedule (`splits.critical_path_first`), it tries merges of tails, then other splits
of one touched device at a time, keeps what is better, and goes round again while that helps (hill
climbing). After a candidate's first moment, the list schedule plays on. The search is bounded by
nodes that end in play (`num_expanded`), never by a clock; the caller turns that number into the time
until the next decision.

Source: JigsawRL (arXiv 2604.23838), look-ahead scheduling: each candidate is judged by playing the
graph some steps ahead and comparing the critical path. Deviations: makespan under the slowdown table
instead of the critical path alone; any number of pipelines; weights, latency caps and holds that end.
`greedy` is the ablation that the paper argues against.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Protocol

import msgspec

from jigsawrl.core.play import BATCH_COST, Move, Policy, Position, Shares, play
from jigsawrl.core.slowdown import LEVELS
from jigsawrl.core.splits import critical_path_first, moves, splits
from jigsawrl.core.timeline import Played

FINISH_WEIGHT = 0.05
"""Of the weighted mean finish beside the makespan. Between equal makespans the one counts that lets
pipelines go on sooner; more than a twentieth would buy that with makespan."""

MIN_PLAYS = 8
"""Plays are cut short so that this many fit into the bound: a decision among fewer candidates is no
search, and the far end of a long graph is a guess anyway."""

_BETTER = 1 - 1e-9
"""What counts as an improvement: rounding does not."""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline was promised."""

    weight: float = 1.0
    """Of its finish among those of the others, above 0."""
    max_slowdown: float | None = None
    """Its latency cap: time for its steps over the time alone, 1 or more; None = no cap."""
    elapsed_s: float = 0.0
    """Since the first step of the graph began."""
    alone_elapsed_s: float = 0.0
    """What that part would have taken alone."""
    alone_left_s: float | None = None
    """What is left of the graph takes alone; None = as long as its longest path."""
    priority: int = 0
    """The pipelines of a higher one are judged first; those of a lower one between equal choices."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of a search."""

    levels: tuple[float, ...] = LEVELS
    """Shares that the device's actuator can set, rising; the last is 1."""
    max_expanded: int = 200
    """Nodes that end in all plays together; the last play may exceed it by its own. Chosen so that a
    decision among a few devices takes some milliseconds."""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do now, and what is expected of it."""

    shares: dict[str, float]
    """By id of every ready node on the devices decided on; 0 = held."""
    moves: dict[str, str]
    """Device by id of the node that moves there."""
    makespan_s: float
    """Predicted, from now on."""
    default_makespan_s: float
    """That of the list schedule: what the decision is expected to gain is the difference."""
    num_expanded: int
    num_candidates: int


class _Choice(msgspec.Struct, frozen=True):
    moves: tuple[Move, ...]
    shares: dict[int, Shares]
    """By device; devices that are absent follow the list schedule."""
    first: str | None = None
    """The pipeline that goes first in the list schedule, now and later."""


_Cost = tuple[float, ...]
"""(excess over latency caps, makespan and weighted finish) of each priority, the highest first; less is
better, in this order."""


class Search(Protocol):
    """`look_ahead` or `greedy`."""

    def __call__(
        self,
        position: Position,
        *,
        terms: Mapping[str, Terms],
        limits: Limits,
        touched: Collection[str] | None = None,
    ) -> Decision:
        """Choose."""


def look_ahead(
    position: Position,
    *,
    terms: Mapping[str, Terms],
    limits: Limits,
    touched: Collection[str] | None = None,
) -> Decision:
    """The best candidate found for the `touched` devices (None: those of `position`), which is left
    as it is. Pipelines without `terms` have the default ones."""
    search = _Search(position, terms, limits, touched)
    search.climb()
    return search.decision()


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What the list schedule comes to, or the best candidate found."""

    cost: tuple[float, ...]
    """(excess over latency caps, makespan and weighted finish) of each priority, the highest first;
    less is better, in this order."""
    makespan_s: float
    num_expanded: int


def listed(
    position: Position, *, terms: Mapping[str, Terms], limits: Limits, max_searched: int = 0
) -> Listed:
    """Play `position`, which is left as it is, by the list schedule, or, as long as fewer nodes than
    `max_searched` have ended, by better candidates; choose nothing."""
    search = _Search(position, terms, limits, None)
    if search.num_expanded < max_searched:
        search.limits = msgspec.structs.replace(limits, max_expanded=max_searched)
        search.climb()
    return Listed(cost=search.cost, makespan_s=search.makespan_s, num_expanded=search.num_expanded)


def greedy(
    position: Position,
    *,
    terms: Mapping[str, Terms],
    limits: Limits,
    touched: Collection[str] | None = None,
) -> Decision:
    """Ablation: the choice with the most weighted work per second right now, without playing
    anything; of equal ones the first in graph order. It merges a tail where that is faster at once."""
    start = position.copy()
    devices = _touched(position, touched)
    weight = {name: terms.get(name, Terms()).weight for name in position.graph.pipelines}
    chosen: tuple[Move, ...] = ()
    for candidate in moves(start, devices):
        sites = {*(device for _, device in candidate), *(start.device[n] for n, _ in candidate)}
        before = sum(_progress(start, d, _fastest(start, d, limits, weight), weight) for d in sites)
        moved = start.copy()
        _move(moved, candidate)
        after = sum(_progress(moved, d, _fastest(moved, d, limits, weight), weight) for d in sites)
        if after * _BETTER > before:
            start, chosen = moved, candidate
            break
    devices |= start.touched if chosen else set()
    for device in sorted(devices):
        start.assign(device, _fastest(start, device, limits, weight))
    return _decision(start, devices, chosen, num_candidates=1)


def play_deciding(position: Position, *, decide: Callable[[Position], Decision]) -> Played:
    """Play `position` to its end with a decision at each event, as the scheduler would."""
    while True:
        apply(position, decision=decide(position))
        if not position.advance():
            assert not any(position.here), "held forever"
            return position.played()


def apply(position: Position, *, decision: Decision) -> None:
    """Carry a decision out."""
    graph = position.graph
    for id, device in decision.moves.items():
        position.move(graph.index[id], graph.device_index[device])
    shares: dict[int, dict[int, float]] = {device: {} for device in position.touched}
    for id, share in decision.shares.items():
        node = graph.index[id]
        lanes = shares.setdefault(position.device[node], {})
        if share > 0:
            lanes[position.lane[node]] = share
    for place in sorted(shares):
        position.assign(place, shares[place])


class _Search:
    """One decision's candidates and what they cost."""

    def __init__(
        self,
        position: Position,
        terms: Mapping[str, Terms],
        limits: Limits,
        touched: Collection[str] | None,
    ) -> None:
        self.position, self.limits = position, limits
        self.terms = {name: terms.get(name, Terms()) for name in position.graph.pipelines}
        self.devices = _touched(position, touched)
        self.policies: dict[str | None, Policy] = {
            first: critical_path_first(limits.levels, first=first)
            for first in (None, *position.graph.pipelines)
        }
        self.num_expanded = self.num_candidates = 0
        self.max_nodes = max(1, limits.max_expanded // MIN_PLAYS)
        self.alone_s = {
            name: position.path_of_s(name) if left_s is None else left_s
            for name, promised in self.terms.items()
            if promised.max_slowdown is not None
            for left_s in [promised.alone_left_s]
        }
        self.classes: dict[int, list[str]] = {}
        """Pipelines by priority, the highest first."""
        for name in sorted(self.terms, key=lambda name: -self.terms[name].priority):
            self.classes.setdefault(self.terms[name].priority, []).append(name)
        weights = ([self.terms[n].weight for n in names] for names in self.classes.values())
        self.finish_weight = [FINISH_WEIGHT + 1 - min(each) / max(each) for each in weights]
        """By place of a priority: unequal weights are a wish that the makespan may not outvote."""
        self.best = _Choice((), {})
        self.cost, self.makespan_s = self.judge(self.best)
        self.default_makespan_s = self.makespan_s

    def climb(self) -> None:
        """Go over to better neighbours until there are none, or the bound is reached. Where there is
        but one thing to do now, there is nothing to search."""
        improved = bool(moves(self.position, self.devices)) or any(
            len(splits(self.position, device, levels=self.limits.levels)) > 1
            for device in self.devices
        )
        while improved:
            improved = False
            for candidate in self.alternatives():
                if self.num_expanded >= self.limits.max_expanded:
                    return
                cost, makespan_s = self.judge(candidate)
                if _better(cost, self.cost):
                    self.best, self.cost, self.makespan_s = candidate, cost, makespan_s
                    improved = True

    def alternatives(self) -> Iterator[_Choice]:
        """Neighbours of the best choice, which may change meanwhile."""
        if not self.best.moves:
            for merge in moves(self.position, self.devices):
                sites = {*(d for _, d in merge), *(self.position.device[n] for n, _ in merge)}
                kept = {d: s for d, s in self.best.shares.items() if d not in sites}
                yield _Choice(merge, kept, self.best.first)
        for first in self.policies:
            if first != self.best.first:
                yield _Choice(self.best.moves, {}, first)
        after = self._at(self.best.moves)
        for device in sorted(self.devices | after.touched, key=lambda d: (-_path_s(after, d), d)):
            listed = self.policies[self.best.first](after, device)
            for split in splits(after, device, levels=self.limits.levels):
                if split != self.best.shares.get(device, listed):
                    yield _Choice(
                        self.best.moves, {**self.best.shares, device: split}, self.best.first
                    )

    def judge(self, choice: _Choice) -> tuple[_Cost, float]:
        """Play a candidate; what it costs, and its makespan from now."""
        position = self._start(choice)
        before = position.num_expanded
        play(position, policy=self.policies[choice.first], max_nodes=self.max_nodes)
        self.num_expanded += max(1, position.num_expanded - before)
        self.num_candidates += 1
        return self._cost(position)

    def decision(self) -> Decision:
        """The best choice by ids."""
        devices = self.devices | self._at(self.best.moves).touched
        return msgspec.structs.replace(
            _decision(self._start(self.best), devices, self.best.moves, self.num_candidates),
            makespan_s=self.makespan_s,
            default_makespan_s=self.default_makespan_s,
            num_expanded=self.num_expanded,
        )

    def _at(self, merge: tuple[Move, ...]) -> Position:
        position = self.position.copy()
        position.touched = set()
        _move(position, merge)
        return position

    def _start(self, choice: _Choice) -> Position:
        position = self._at(choice.moves)
        for device in sorted(d for d in self.devices | position.touched if position.here[d]):
            shares = choice.shares.get(device)
            if shares is None:
                shares = self.policies[choice.first](position, device)
            position.assign(device, shares)
        position.touched = set()
        return position

    def _cost(self, position: Position) -> tuple[_Cost, float]:
        finish_s = position.estimate_finish_s()
        now_s = self.position.now_s
        end_s = max([*finish_s.values(), position.estimate_makespan_s()])
        cost: list[float] = []
        for names in self.classes.values():
            excess = total = weights = 0.0
            for name in names:
                promised = self.terms[name]
                left_s = max(0.0, finish_s[name] - now_s)
                total += promised.weight * left_s
                weights += promised.weight
                if promised.max_slowdown is not None:
                    alone_s = promised.alone_elapsed_s + self.alone_s[name]
                    cap_s = promised.max_slowdown * alone_s
                    excess += promised.weight * max(0.0, promised.elapsed_s + left_s - cap_s)
            last = len(cost) == 2 * (len(self.classes) - 1)
            latest_s = end_s if last else max(finish_s[name] for name in names)
            cost += excess, latest_s - now_s + self.finish_weight[len(cost) // 2] * total / weights
        return tuple(cost), end_s - now_s


def _better(cost: _Cost, than: _Cost) -> bool:
    for one, other in zip(cost, than, strict=True):
        if min(one, other) < _BETTER * max(one, other):
            return one < other
    return False


def _touched(position: Position, touched: Collection[str] | None) -> set[int]:
    """Devices to decide on, idle ones included: a tail may move there."""
    index = position.graph.device_index
    devices = set(position.touched)
    if touched is not None:
        # One with nothing running would stay as it is until a hold ends: it is decided on as well.
        asleep = {d for d in devices if not any(position.share[n] for n in position.here[d])}
        devices = {index[device] for device in touched} | asleep
    return devices


def _move(position: Position, merge: tuple[Move, ...]) -> None:
    for node, device in merge:
        position.move(node, device)


def _path_s(position: Position, device: int) -> float:
    return max((position.path_s(node) for node in position.here[device]), default=0.0)


def _fastest(
    position: Position, device: int, limits: Limits, weight: Mapping[str, float]
) -> Shares:
    found = splits(position, device, levels=limits.levels)
    return max(
        sorted(found, key=lambda split: sorted((lane, -share) for lane, share in split.items())),
        key=lambda split: round(_progress(position, device, split, weight), 9),
        default={},
    )


def _progress(
    position: Position, device: int, shares: Shares, weight: Mapping[str, float]
) -> float:
    """Weighted full-speed seconds of work per second on one device."""
    lanes, nodes = position.lanes(device), position.graph.nodes
    speeds = position.table.speeds(tuple((nodes[lane].kind, s) for lane, s in shares.items()))
    return sum(
        weight[nodes[lane].pipeline]
        * speed
        * (1 if len(lanes[lane]) == 1 else len(lanes[lane]) / BATCH_COST)
        for lane, speed in zip(shares, speeds, strict=True)
    )


def _decision(
    position: Position, devices: set[int], merge: tuple[Move, ...], num_candidates: int
) -> Decision:
    graph = position.graph
    return Decision(
        shares={
            graph.nodes[node].id: position.share[node]
            for device in sorted(devices)
            for node in position.here[device]
        },
        moves={graph.nodes[node].id: graph.devices[device].id for node, device in merge},
        makespan_s=0.0,
        default_makespan_s=0.0,
        num_expanded=0,
        num_candidates=num_candidates,
    )
