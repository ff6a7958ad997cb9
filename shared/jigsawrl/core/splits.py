"""The action space on one device and between devices: share splits, holds and moves of tails.

`lookahead` searches it; `critical_path_first` picks from it without looking ahead. Every choice here
keeps the rules: shares sum to at most 1, memory is never over budget, and a node that has been held
for `max_hold_s` in all is not held again. While such a node waits for memory, nothing else starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from jigsawrl.core.play import Move, Policy, Position, Shares
from jigsawrl.core.slowdown import LEVELS

MAX_LANES = 3
"""Lanes whose splits are enumerated: those of the longest paths. Three lanes in quarters are 15
splits, four are 35; more lanes may still have equal shares, as long as there is a level for that."""

MAX_TARGETS = 2
"""Targets tried per tail: a third one is rarely better, and each costs a whole play."""

_GAIN = 1.02
"""Sharing must do this much more work per second than taking turns, or it only adds switches."""

_EPSILON = 1e-9


class Lane(NamedTuple):
    """What may have a share: see `play`."""

    id: int
    need_bytes: int
    overdue: bool
    path_s: float


def eligible(position: Position, device: int) -> list[Lane]:
    """Lanes that may run now: overdue ones first, then by longest path."""
    if not position.graph.is_tight[device]:
        lanes = [
            Lane(lane, 0, any(map(position.overdue, nodes)), max(map(position.path_s, nodes)))
            for lane, nodes in position.lanes(device).items()
        ]
        return sorted(lanes, key=_order)
    free_bytes = position.free_bytes(device)
    lanes = [
        Lane(
            id=lane,
            need_bytes=position.need_bytes(nodes),
            overdue=any(position.overdue(node) for node in nodes),
            path_s=max(position.path_s(node) for node in nodes),
        )
        for lane, nodes in position.lanes(device).items()
    ]
    starved = any(
        position.graph.nodes[node].memory_bytes > free_bytes
        for node in position.here[device]
        if not position.started[node] and position.overdue(node)
    )
    fitting = (
        lane
        for lane in lanes
        if not lane.need_bytes or (lane.need_bytes <= free_bytes and (lane.overdue or not starved))
    )
    return sorted(fitting, key=_order)


def _order(lane: Lane) -> tuple[bool, float, int]:
    return not lane.overdue, -lane.path_s, lane.id


def splits(position: Position, device: int, *, levels: tuple[float, ...] = LEVELS) -> list[Shares]:
    """Every choice for a device: splits of which no lane could have a level more, equal shares where
    there are many lanes, and to hold everything where memory may be better kept free."""
    lanes = eligible(position, device)
    if not lanes:
        return []
    room = position.free_bytes(device)
    overdue = _together([lane for lane in lanes if lane.overdue], room)
    if len(overdue) * levels[0] > 1 + _EPSILON:
        return [_equal(overdue, levels)]
    others = [lane for lane in lanes if not lane.overdue]
    first = [*overdue, *others[: max(0, MAX_LANES - len(overdue))]]
    found = list(_maximal(first, levels, room))
    if len(lanes) > MAX_LANES and len(lanes) * levels[0] <= 1 + _EPSILON:
        found.append(_equal(_together(lanes, room), levels))
    idle = not overdue and all(lane.need_bytes for lane in lanes)
    if idle and position.graph.is_tight[device]:
        found.append({})
    return found


def moves(position: Position, devices: set[int]) -> list[tuple[Move, ...]]:
    """Merges of tails that involve one of `devices`: all tails of a step onto one worker or onto
    half of them, or a single tail onto another worker or onto an idle one."""
    tails: dict[int, list[int]] = {}
    for nodes in position.here[:-1]:
        for node in nodes:
            if position.graph.nodes[node].movable_to:
                tails.setdefault(position.lane[node], []).append(node)
    free = [device for device, at in enumerate(position.here[:-1]) if not at]
    idle = sorted(free, key=lambda device: (device not in devices, device))[:1]
    found: list[tuple[Move, ...]] = []
    for nodes in tails.values():
        hosts = sorted({position.device[node] for node in nodes})
        targets = sorted(hosts, key=lambda host: (len(position.here[host]), host))[:MAX_TARGETS]
        if len(hosts) > 2 and devices.intersection(hosts):
            found += [tuple((n, t) for n in nodes if position.device[n] != t) for t in targets]
            half = len(hosts) // 2 if len(hosts) > 3 else 0
            other = dict(zip(hosts[-half:], hosts, strict=False)) if half else {}
            found.append(
                tuple((n, other[at]) for n in nodes if (at := position.device[n]) in other)
            )
        for node in nodes:
            source = position.device[node]
            found += [
                ((node, t),)
                for t in (*targets, *idle)
                if t != source and (source in devices or t in devices)
            ]
    return [
        merge
        for merge in dict.fromkeys(found)
        if merge and all(position.can_move(node, device) for node, device in merge)
        if _has_room(position, merge)
    ]


def _has_room(position: Position, merge: tuple[Move, ...]) -> bool:
    """The memory of all that moves to a device fits there together."""
    coming: dict[int, int] = {}
    for node, device in merge:
        if position.started[node]:
            coming[device] = coming.get(device, 0) + position.graph.nodes[node].memory_bytes
    return all(needed <= position.free_bytes(device) for device, needed in coming.items())


def critical_path_first(levels: tuple[float, ...] = LEVELS, *, first: str | None = None) -> Policy:
    """A list schedule: the lane of the longest path has the whole device, or the best split with the
    next lane where the table says that sharing gains. Overdue lanes have the smallest level. Lanes of
    the pipeline `first` go before those of longer paths."""

    def policy(position: Position, device: int) -> Shares:
        here = position.here[device]
        if len(here) == 1:
            return {position.lane[here[0]]: 1.0}
        if position.capacity <= _GAIN and not position.graph.is_tight[device]:
            lane = _longest(position, here, first)
            if lane is not None:
                return {lane: 1.0}
        lanes = eligible(position, device)
        if first is not None and len(lanes) > 1:
            nodes = position.graph.nodes
            lanes.sort(key=lambda lane: (not lane.overdue, nodes[lane.id].pipeline != first))
        if len(lanes) < 2:
            return {lane.id: 1.0 for lane in lanes}
        room = position.free_bytes(device)
        if lanes[0].overdue:
            return _keeping_overdue(lanes, room, levels)
        pair = _together(lanes[:2], room)
        if len(pair) < 2:
            return {pair[0].id: 1.0}
        return _best_pair(position, pair, levels)

    return policy


def _longest(position: Position, here: list[int], first: str | None) -> int | None:
    """The lane that goes first where sharing gains nothing and all have room; None where one is
    overdue. What the list schedule does most of the time, without listing anything."""
    nodes, best, longest_s, best_first = position.graph.nodes, -1, -1.0, False
    for node in here:
        if position.overdue(node):
            return None
        goes_first = first is not None and nodes[node].pipeline == first
        if goes_first < best_first:
            continue
        path_s, lane = position.path_s(node), position.lane[node]
        if goes_first > best_first or path_s > longest_s or (path_s == longest_s and lane < best):
            best, longest_s, best_first = lane, path_s, goes_first
    return best


def _keeping_overdue(lanes: list[Lane], room: float, levels: tuple[float, ...]) -> Shares:
    """The smallest level for lanes that may not be held, the rest for the first of the others."""
    chosen = _together(lanes, room)
    overdue = [lane for lane in chosen if lane.overdue]
    if len(overdue) * levels[0] > 1 + _EPSILON:
        return _equal(overdue, levels)
    shares = {lane.id: levels[0] for lane in overdue}
    top = next((lane.id for lane in chosen if not lane.overdue), overdue[0].id)
    left = 1 - levels[0] * len(overdue) + shares.get(top, 0.0)
    share = _level(levels, left)
    return shares if share is None else {**shares, top: share}


def _best_pair(position: Position, pair: list[Lane], levels: tuple[float, ...]) -> Shares:
    """Shares with which two lanes get on fastest in total; the first alone where sharing gains
    nothing."""
    best, shares = _GAIN, {pair[0].id: 1.0}
    if position.capacity <= _GAIN:
        return shares
    one, two = (position.graph.nodes[lane.id].kind for lane in pair)
    for level in levels[-2::-1]:
        other = _level(levels, 1 - level)
        if other is not None:
            total = sum(position.table.speeds(((one, level), (two, other))))
            if total > best + _EPSILON:
                best, shares = total, {pair[0].id: level, pair[1].id: other}
    return shares


def _level(levels: tuple[float, ...], share: float) -> float | None:
    """The largest level within `share`."""
    return max((level for level in levels if level <= share + _EPSILON), default=None)


def _together(lanes: list[Lane], room: float) -> list[Lane]:
    """Those that fit into memory side by side, the first first."""
    chosen: list[Lane] = []
    for lane in lanes:
        if lane.need_bytes <= room:
            chosen.append(lane)
            room -= lane.need_bytes
    return chosen


def _equal(lanes: list[Lane], levels: tuple[float, ...]) -> Shares:
    """The same level for all; below the lowest, where an actuator with fixed levels must refuse, only
    for more lanes than there are levels for."""
    equal = 1 / len(lanes)
    return {lane.id: _level(levels, equal) or equal for lane in lanes}


def _maximal(lanes: list[Lane], levels: tuple[float, ...], room: float) -> Iterator[Shares]:
    """Splits of which no lane could have a level more; overdue lanes, which are the first and fit
    into memory together, get one level at least."""
    num_overdue = sum(lane.overdue for lane in lanes)

    def extend(place: int, left: float, room: float, shares: dict[int, float]) -> Iterator[Shares]:
        if place == len(lanes):
            if not any(
                _next(levels, shares.get(lane.id, 0.0)) <= left + _EPSILON
                and (lane.id in shares or lane.need_bytes <= room)
                for lane in lanes
            ):
                yield dict(shares)
            return
        lane = lanes[place]
        kept = levels[0] * max(0, num_overdue - place - 1)
        if lane.need_bytes <= room:
            for level in reversed(levels):
                if level <= left - kept + _EPSILON:
                    chosen = {**shares, lane.id: level}
                    yield from extend(place + 1, left - level, room - lane.need_bytes, chosen)
        if not lane.overdue:
            yield from extend(place + 1, left, room, shares)

    return extend(0, 1.0, room, {})


def _next(levels: tuple[float, ...], share: float) -> float:
    """What the next level above `share` adds."""
    return next((level - share for level in levels if level > share + _EPSILON), float("inf"))
