"""The slowdown table: how fast a sub-stage runs at a share of a device, alone or beside another.

`prediction` asks it to turn observed seconds into full-speed work, `play` to turn work into seconds.
It never reads a file: `jigsaw profile` writes a `SlowdownProfile`, `profile_file` reads and checks it,
and the leader's election brings it into the state.

Source: JigsawRL (arXiv 2604.23838), an offline-profiled lookup (kind A, kind B, resource split) ->
slowdown of each. Deviations: speeds (1 / slowdown) are stored, shares between the profiled ones are
interpolated, and any number of sub-stages may share a device: each further one multiplies its
pairwise factor in, as nobody profiles triples.
"""

from __future__ import annotations

from typing import Literal

from jigsawrl.contract.message import SubStageKind
from jigsawrl.contract.profile import MISSING_PAIR_FACTOR as MISSING_PAIR_FACTOR
from jigsawrl.contract.profile import SlowdownProfile as SlowdownProfile
from jigsawrl.contract.profile import SlowdownRow as SlowdownRow

WAITS: frozenset[SubStageKind] = frozenset({"tool_wait", "reward_wait"})
"""Kinds that use no device: time passes for them whatever the shares are."""

NodeKind = SubStageKind | Literal["barrier", "elsewhere"]
"""Of a node in a graph. A ``barrier`` has no work: where many wait for many, it keeps the edges few.
``elsewhere`` stands for what tenants on devices outside the graph do meanwhile."""

WITHOUT_DEVICE: frozenset[NodeKind] = frozenset({*WAITS, "barrier", "elsewhere"})

LEVELS = (0.25, 0.5, 0.75, 1.0)
"""Shares that are profiled and chosen from. Quarters: the paper's budgets are discrete, and finer
ones change a makespan less than predictions err."""

_CACHE_SIZE = 4096
"""Remembered answers; shares are discrete, so that a cluster asks far fewer questions than this."""

_EPSILON = 1e-9

Running = tuple[NodeKind, float]
"""What runs on a device, and its share."""

_Curve = tuple[tuple[float, float], ...]
"""Points (x, y) by rising x, joined by straight lines."""


CPU_SLOT = SlowdownProfile(
    device_kind="cpu",
    source="built in: one core divided in time gives speed = share; 3 % for caches and switches",
    missing_pair_factor=0.97,
)
"""Of one core. The 3 % keep plans from splitting a core where nothing is gained by it."""


TAIL_SEQUENCES = {"cpu": 8, "cuda": 128}
"""By kind of device, where no profile says it: on a worker that holds no more, decoding is a tail. Of a
CPU slot, measured with the example's model (docs/rollout.md); of a GPU, as in the paper."""


def check_profile(profile: SlowdownProfile, *, device_kind: str) -> None:
    """Refuse what can't be used on `device_kind`; ValueError is one line for people."""
    if profile.device_kind != device_kind:
        raise ValueError(
            f"slowdown profile: measured on {profile.device_kind!r}, but the device here is"
            f" {device_kind!r}: run `jigsaw profile` on this machine"
        )
    if not 0 < profile.missing_pair_factor <= 1:
        raise ValueError(
            f"slowdown profile: missing_pair_factor is above 0 and at most 1,"
            f" not {profile.missing_pair_factor}"
        )
    seen: set[tuple[object, ...]] = set()
    for number, row in enumerate(profile.rows):
        problem = _problem(row)
        key = (row.kind, row.share, row.beside, row.beside_share)
        if problem is None and key in seen:
            problem = "measured twice: keep one of the rows"
        if problem is not None:
            raise ValueError(f"slowdown profile: rows[{number}] ({row.kind}): {problem}")
        seen.add(key)


def _problem(row: SlowdownRow) -> str | None:
    if row.kind in WAITS or row.beside in WAITS:
        return "a wait uses no device: leave the row out"
    if not 0 < row.share <= 1:
        return f"share is above 0 and at most 1, not {row.share}"
    if not 0 < row.speed <= 1:
        return f"speed is above 0 and at most 1 (full speed alone), not {row.speed}"
    if (row.beside is None) != (row.beside_share is None):
        return "beside and beside_share come together: give both or none"
    if row.beside_share is None:
        if row.share == 1 and row.speed != 1:
            return f"alone at share 1 the speed is 1 by definition, not {row.speed}"
    elif row.beside_share <= 0 or row.share + row.beside_share > 1 + _EPSILON:
        return f"shares are above 0 and sum to at most 1, not {row.share} and {row.beside_share}"
    return None


class SlowdownTable:
    """Answers from one checked profile. Without a row, alone: speed = share (a kind that saturates
    below the whole device does better); beside: that times `missing_pair_factor`."""

    def __init__(self, profile: SlowdownProfile) -> None:
        self.profile = profile
        alone: dict[SubStageKind, dict[float, float]] = {}
        for row in profile.rows:
            if row.beside is None:
                alone.setdefault(row.kind, {0.0: 0.0, 1.0: 1.0})[row.share] = row.speed
        self._alone: dict[NodeKind, _Curve] = {k: _curve(v) for k, v in alone.items()}
        pairs: dict[tuple[SubStageKind, SubStageKind], dict[float, dict[float, float]]] = {}
        for row in profile.rows:
            if row.beside is not None and row.beside_share is not None:
                curves = pairs.setdefault((row.kind, row.beside), {})
                # Interference may not read as a gain: measured above its speed alone, it is noise.
                factor = min(1.0, row.speed / self._speed_alone(row.kind, row.share))
                curves.setdefault(row.share, {0.0: 1.0})[row.beside_share] = factor
        self._pairs: dict[tuple[NodeKind, NodeKind], list[tuple[float, _Curve]]] = {
            pair: sorted((share, _curve(points)) for share, points in curves.items())
            for pair, curves in pairs.items()
        }
        self._speeds: dict[tuple[Running, ...], tuple[float, ...]] = {}

    @property
    def capacity(self) -> float:
        """Most full-speed seconds of work that a device can do in a second, however it is divided:
        the largest speed / share, as speeds alone are sums of shares times that at most."""
        points = (point for curve in self._alone.values() for point in curve)
        return max([1.0, *(speed / share for share, speed in points if share > 0)])

    def speed(self, kind: NodeKind, *, share: float, beside: Running | None = None) -> float:
        """Fraction of the kind's full speed alone on the device; 0 at share 0, 1 for waits."""
        running = ((kind, share),) if beside is None else ((kind, share), beside)
        return self.speeds(running)[0]

    def speeds(self, running: tuple[Running, ...]) -> tuple[float, ...]:
        """Speed of each of those that run on one device at once."""
        known = self._speeds.get(running)
        if known is None:
            if len(self._speeds) >= _CACHE_SIZE:
                self._speeds.clear()
            known = tuple(self._speed_among(running, place) for place in range(len(running)))
            self._speeds[running] = known
        return known

    def _speed_among(self, running: tuple[Running, ...], place: int) -> float:
        kind, share = running[place]
        if kind in WAITS:
            return 1.0
        speed = self._speed_alone(kind, share)
        for other, (beside, beside_share) in enumerate(running):
            if other != place and beside_share > 0 and beside not in WAITS:
                speed *= self._factor(kind, share, beside, beside_share)
        return speed

    def _speed_alone(self, kind: NodeKind, share: float) -> float:
        curve = self._alone.get(kind)
        return share if curve is None else _at(curve, share)

    def _factor(self, kind: NodeKind, share: float, beside: NodeKind, beside_share: float) -> float:
        curves = self._pairs.get((kind, beside))
        if curves is None:
            return self.profile.missing_pair_factor
        return _at(tuple((at, _at(curve, beside_share)) for at, curve in curves), share)


def _curve(points: dict[float, float]) -> _Curve:
    return tuple(sorted(points.items()))


def _at(curve: _Curve, x: float) -> float:
    """Linear between points, level beyond the first and last."""
    before = curve[0]
    for point in curve:
        if x <= point[0]:
            width = point[0] - before[0]
            if width <= 0:
                return point[1]
            return before[1] + (point[1] - before[1]) * (x - before[0]) / width
        before = point
    return before[1]
