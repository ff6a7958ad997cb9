"""Which rollout workers generate on which devices: proportional to what each pipeline has left.

A pure function, called by the policy `rlix`; it knows devices and workers by id only.

Source: RLix (github.com/rlops/rlix), `rlix/scheduler/planner.py`, `plan_generation_gap_ratio`, with one
device per worker. The share of a pipeline in the work is its target for its share of the devices; what
is most behind its target, as a fraction of it, gets the next device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import msgspec


class Worker(msgspec.Struct, frozen=True):
    """One rollout worker; it works on no other device."""

    id: str
    device: str


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline that generates, or did until now."""

    pipeline: str
    remaining: int
    """Sequences to generate; of a pipeline that waits for its first worker, a full step more."""
    fraction: float
    """Of a step that these are: of two donors the one further from its end gives."""
    workers: tuple[Worker, ...]
    """In order of rank."""
    active: tuple[str, ...]
    """Those that have their device now, each a device of its own."""


Active = dict[str, tuple[str, ...]]
"""Pipeline -> its rollout workers that have their device."""


class _State:
    """One pipeline while devices are given away."""

    def __init__(self, demand: Demand, *, total: int, budget: int) -> None:
        """`total` is what all have to do, `budget` what devices there are."""
        self.name = demand.pipeline
        self.fraction = demand.fraction
        self.workers = demand.workers
        self.active = [worker for worker in demand.workers if worker.id in demand.active]
        self._budget = budget
        self._target = demand.remaining / total if total else 0.0
        half_up = math.floor(self._target * budget + 0.5)
        self.num_wanted = max(1, half_up) if demand.remaining else 0

    @property
    def gap(self) -> float:
        """Share of the devices that it should have, less what it has."""
        return self._target - len(self.active) / self._budget

    @property
    def receives(self) -> bool:
        """Below its target."""
        return self.gap > 0 and len(self.active) < self.num_wanted

    @property
    def gives(self) -> bool:
        """Above its target, and above its floor: nobody with work to do loses the last worker."""
        return self.gap < 0 and len(self.active) > self.num_wanted

    @property
    def order(self) -> tuple[float, float, str]:
        """The first is furthest behind."""
        return -self.gap / self._target, -self.gap, self.name


def gap_ratio(demands: Sequence[Demand], *, idle: Collection[str]) -> Active:
    """Who is active from now on. `idle` devices have no owner; those that are neither idle nor of an
    active worker are not to be had. A worker changes at most once, so that this ends."""
    free = set(idle)
    budget = len(free) + sum(len(demand.active) for demand in demands)
    if not budget:
        return {demand.pipeline: () for demand in demands}
    total = sum(demand.remaining for demand in demands)
    states = [_State(demand, total=total, budget=budget) for demand in demands]
    changed: set[str] = set()
    while any(
        _activate_one(receiver, states, free, changed)
        for receiver in sorted((s for s in states if s.receives), key=lambda state: state.order)
    ):
        pass
    return {state.name: tuple(w.id for w in state.workers if w in state.active) for state in states}


def _activate_one(
    receiver: _State, states: list[_State], free: set[str], changed: set[str]
) -> bool:
    """The next worker of `receiver`: on an idle device, else on that of the donor with the most left to
    do; of equals the one of lowest rank. False where there is none."""
    owners: Mapping[str, tuple[_State, Worker]] = {
        worker.device: (state, worker) for state in states for worker in state.active
    }
    best: tuple[tuple[int, float, int], Worker] | None = None
    for rank, worker in enumerate(receiver.workers):
        if worker in receiver.active or worker.id in changed:
            continue
        if worker.device in free:
            score = (0, 0.0, rank)
        else:
            donor = owners.get(worker.device)
            if donor is None or not donor[0].gives or donor[1].id in changed:
                continue
            score = (1, -donor[0].fraction, rank)
        if best is None or score < best[0]:
            best = (score, worker)
    if best is None:
        return False
    taken = best[1]
    if taken.device in free:
        free.remove(taken.device)
    else:
        state, given = owners[taken.device]
        state.active.remove(given)
        changed.add(given.id)
    receiver.active.append(taken)
    changed.add(taken.id)
    return True


def out_of_balance(demands: Sequence[Demand]) -> bool:
    """Whether to plan anew though nothing else has changed: somebody with work to do has no worker, or
    the half that is furthest from its end has a share of the work and one of the devices that differ by
    more than ten points (RLix, `_should_background_rebalance_locked`)."""
    if any(demand.remaining and not demand.active for demand in demands):
        return True
    total = sum(demand.remaining for demand in demands)
    num_active = sum(len(demand.active) for demand in demands)
    if len(demands) < 2 or not total or not num_active:
        return False
    behind = sorted(demands, key=lambda demand: -demand.fraction)[: math.ceil(len(demands) / 2)]
    work = sum(demand.remaining for demand in behind) / total
    devices = sum(len(demand.active) for demand in behind) / num_active
    return abs(work - devices) > 0.1
