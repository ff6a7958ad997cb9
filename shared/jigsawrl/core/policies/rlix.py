"""`rlix`: all pipelines at once; a device has one user, training before generation, and what generates
gets devices in proportion to what is left to generate.

Source: RLix (github.com/rlops/rlix), `rlix/scheduler/scheduler.py` and `planner.py`. A shared pool of
devices; requests by priority (initialisation, actor training, critic training, old log-probs, reference
log-probs, values, generation), first come first served within a priority. Only rollout workers can be
preempted: a request of a higher priority takes idle devices, and shrinks generation on the others it
needs. The rest of the devices goes to generation by `gap_ratio`. Planned on events and at each 2 % of
progress; or when a pipeline has work and no worker, or is ten points out of balance.

Deviations:
- Critic training and all log-probs and values are parts of our trainer's step, which is one request
  with the priority of actor training.
- Tenants stay resident: who has a device has all of it but a small share of each other tenant. These
  take what is left idle.
- What a shrunk worker generates is not aborted: it moves to the pipeline's active workers and goes on
  there; where the pipeline has none, it stays, at the small share. A worker that was activated takes an
  even part from the others.
- A device changes hands by one command, which is how shrinking comes before expanding.
- Work left is that of all groups admitted, in mode `async` those of later steps too.
- Evaluation, which RLix does not have, comes last: it has a device that nobody else has.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from jigsawrl.core import ids
from jigsawrl.core.allotment import Allotment, Request
from jigsawrl.core.group import GENERATING, Sequence
from jigsawrl.core.migration import MIN_STAY_S, Move
from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.gap_ratio import Demand, Worker, gap_ratio, out_of_balance
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.shares import Wanted, equal
from jigsawrl.core.state import Pipeline, State, Tenant

INITIALISATION, TRAINING = 0, 1
"""Tiers of requests; generation comes after both."""

IDLE_SHARE = 0.05
"""Of each tenant that does not have the device: it must answer the bus, and no one starves. Together
half a device at most."""

PROGRESS_BANDS = 50
"""Progress counts as an event in steps of 2 %, as RLix reports it."""


class Rlix(Policy):
    """Gives each device to one user at a time."""

    name = "rlix"
    every_tick = True

    def starts(self, state: State) -> list[Start]:
        """Every queued pipeline, as far as there are devices."""
        return start_all(state)

    def shares(self, state: State) -> Wanted:
        """Nearly all of a device for who has it; equal where nobody does."""
        _plan(state)
        wanted = equal(state)
        users = _users(state)
        for device, tenants in wanted.items():
            using = [name for name in tenants if name in users]
            if using and len(using) < len(tenants):
                others = len(tenants) - len(using)
                rest = min(IDLE_SHARE, 0.5 / others)
                part = (1 - rest * others) / len(using)
                wanted[device] = {name: part if name in users else rest for name in tenants}
        return wanted

    def workers(self, state: State, pipeline: Pipeline) -> Collection[str] | None:
        """Those that have a device, where any has."""
        if state.pool.sequence != state.sequence:
            _plan(state)
        return state.pool.active.get(pipeline.name) or None

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        """Off workers that lost their device; and to one that has nothing yet, its part."""
        active = self.workers(state, pipeline) or ()
        open_to = [name for name in active if pipeline.tenants[name].loading is None]
        if not open_to:
            return []
        held, busy = _held(state, pipeline)
        moves = [
            _move(pipeline, one, held, source=name, targets=open_to)
            for name in sorted(w.id for w in _workers(pipeline) if w.id not in active)
            for one in list(held[name])
        ]
        part = sum(len(held[name]) for name in active) // len(active)
        for name in open_to:
            for _ in range(0 if name in busy or moves else part):
                fullest = max(active, key=lambda other: len(held[other]))
                if len(held[fullest]) - len(held[name]) > 1:
                    one = held[fullest][-1]
                    moves.append(_move(pipeline, one, held, source=fullest, targets=[name]))
        return moves


# --- Requests -------------------------------------------------------------------------------------


def _plan(state: State) -> None:
    """Grant requests, then divide the other devices among those that generate."""
    pool, pipelines = state.pool, [p for p in state.pipelines.values() if p.active]
    pool.sequence = state.sequence
    _renew(state, pipelines)
    taken = _grant(pool, pipelines)
    devices = {d.id for node in state.nodes.values() if node.open for d in node.devices} - taken
    pool.active = {
        p.name: tuple(
            worker.id
            for worker in _workers(p)
            if worker.id in pool.active.get(p.name, ()) and worker.device in devices
        )
        for p in pipelines
    }
    demands = [_demand(pool, p) for p in pipelines]
    bands = [
        (d.pipeline, math.ceil(d.fraction * PROGRESS_BANDS), [w.id for w in d.workers])
        for d in demands
    ]
    signature = f"{sorted(devices)} {bands} {pool.requests}"
    if signature == pool.signature and not out_of_balance(demands):
        return
    pool.signature = signature
    used = {w.device for d in demands for w in d.workers if w.id in d.active}
    pool.active = gap_ratio(demands, idle=devices - used)
    wanting = {d.pipeline for d in demands if d.remaining}
    pool.generating = [
        p.name
        for p in pipelines
        if p.name in wanting and (p.name in pool.generating or pool.active[p.name])
    ]


def _renew(state: State, pipelines: list[Pipeline]) -> None:
    """Who asks for what now. A request that goes on keeps its place, and what it was granted."""
    pool, renewed = state.pool, {}
    for pipeline in pipelines:
        if pipeline.version is None or not pipeline.gang_ready:
            tier = INITIALISATION
        elif pipeline.open_cut is not None:
            tier = TRAINING
        else:
            continue
        before = pool.requests.get(pipeline.name)
        if before is None:
            before = Request(tier, state.sequence)
        elif before.tier != tier:
            before = Request(tier, state.sequence, before.granted)
        renewed[pipeline.name] = before
    pool.requests = renewed


def _grant(pool: Allotment, pipelines: list[Pipeline]) -> set[str]:
    """The devices of all requests that are granted: what was granted is not taken back, and of the
    others each gets all that it needs or nothing."""
    needs = {p.name: {rank.device for rank in p.gang if rank.device is not None} for p in pipelines}
    taken: set[str] = set()
    for name, request in pool.requests.items():
        if request.granted:
            taken |= needs[name]
    waiting = [name for name, request in pool.requests.items() if not request.granted]
    for name in sorted(waiting, key=lambda name: _order(pool.requests[name])):
        request = pool.requests[name]
        if not needs[name] & taken:
            pool.requests[name] = Request(request.tier, request.sequence, True)
            taken |= needs[name]
    return taken


def _order(request: Request) -> tuple[int, int]:
    return request.tier, request.sequence


# --- Generation -----------------------------------------------------------------------------------


def _workers(pipeline: Pipeline) -> list[Worker]:
    """Rollout workers that take work on a device that the scheduler divides."""
    return [
        Worker(t.id, t.device)
        for t in pipeline.usable("rollout")
        if t.node is not None and t.device is not None
    ]


def _demand(pool: Allotment, pipeline: Pipeline) -> Demand:
    step = pipeline.spec.groups_per_batch * pipeline.spec.group_size
    remaining = sum(
        s.stage == "waiting" or s.stage in GENERATING
        for group in pipeline.groups.values()
        for s in group.sequences
    )
    if remaining and pipeline.name not in pool.generating:
        remaining += step  # it starts: a full step more, so that it gets a worker
    return Demand(
        pipeline=pipeline.name,
        remaining=remaining,
        fraction=remaining / step,
        workers=tuple(_workers(pipeline)),
        active=pool.active[pipeline.name],
    )


def _users(state: State) -> set[str]:
    """Tenants that have their device."""
    users: list[Tenant] = []
    for pipeline in state.pipelines.values():
        request = state.pool.requests.get(pipeline.name)
        if request is not None and request.granted:
            users += pipeline.gang
        users += [
            pipeline.tenants[name]
            for name in state.pool.active.get(pipeline.name, ())
            if name in pipeline.tenants
        ]
    used = {tenant.device for tenant in users}
    for pipeline in state.pipelines.values():
        evaluation = pipeline.evaluation
        if evaluation is not None and evaluation.sent_to is not None:
            tenant = pipeline.tenants[evaluation.sent_to.id]
            if tenant.device not in used:
                users.append(tenant)
                used.add(tenant.device)
    return {tenant.id for tenant in users}


# --- Moves ----------------------------------------------------------------------------------------

Held = dict[str, list[tuple[int, Sequence]]]
"""Worker -> (group number, sequence) of what it could give away."""


def _held(state: State, pipeline: Pipeline) -> tuple[Held, set[str]]:
    """What runs where, and did not come there just now; and all workers that have something, or are
    about to."""
    held: Held = {tenant.id: [] for tenant in pipeline.usable("rollout")}
    busy: set[str] = set()
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            if sequence.target is not None:
                busy.add(sequence.target)
            if sequence.owner is None or sequence.owner.id not in held:
                continue
            busy.add(sequence.owner.id)
            stayed_s = state.clock.now_s - sequence.moved_s
            stays = sequence.num_moves and stayed_s < MIN_STAY_S
            if sequence.stage == "running" and not stays:
                held[sequence.owner.id].append((group.number, sequence))
    return held, busy


def _move(
    pipeline: Pipeline,
    one: tuple[int, Sequence],
    held: Held,
    *,
    source: str,
    targets: list[str],
) -> Move:
    """To the target with the least; noted in `held`."""
    target = min(targets, key=lambda name: len(held[name]))
    held[source] = [other for other in held[source] if other is not one]
    held[target].append(one)
    name = ids.sequence_id(pipeline.name, one[0], one[1].index)
    return Move(sequence=name, target=target)
