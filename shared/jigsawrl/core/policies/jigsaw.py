"""`jigsaw`: all pipelines at once; shares, holds and merges by look-ahead on the Sub-Stage Graph.

Source: JigsawRL (arXiv 2604.23838), sub-stage multiplexing, merging and look-ahead scheduling; the
deviations are those of `graph`, `play` and `lookahead`. Before any history: equal shares, no holds.

A situation is decided on once: when what some tenant does changes, or a hold has lasted. Then the next
steps of the pipelines that meet on its device, and on some around it (`horizon`), are predicted, joined
into one graph, and searched. What was decided on a device stays until it is decided on again, or other
tenants live there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from jigsawrl.contract.spec import Device
from jigsawrl.core import horizon, ids, pace, phases, profiles, shares
from jigsawrl.core.graph import DeviceBudget, Graph, Node
from jigsawrl.core.horizon import MAX_DEVICES
from jigsawrl.core.lookahead import Decision, Limits, Search, Terms, look_ahead
from jigsawrl.core.migration import MIN_STAY_S, Move
from jigsawrl.core.outlook import MAX_DECISIONS, Decided
from jigsawrl.core.pipelines import rests
from jigsawrl.core.play import Position
from jigsawrl.core.policies import gather
from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.prediction import HORIZON_STEPS, Outlook, predict
from jigsawrl.core.shares import Wanted, equal
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.terms import FLOOR_SHARE, by_priority, unequal

MAX_HOLD_S = 2.0
"""A ready sub-stage waits for others no longer than this in all: about a step of a small model."""

MOVE_S = 0.05
"""Full-speed seconds of prefill that a merge costs: `jigsaw bench migration` prints 0.04 for one
sequence of 378 tokens and 0.24 for eight, on a slot."""

EQUAL_S = 0.5
"""What every sub-stage is taken to last where nothing is predicted."""

LIMITS = Limits(max_expanded=25 * MAX_DEVICES)
"""As many nodes for each device as the default has for eight."""

EXPANDED_S = 50e-6
"""Stream time that a decision waits per node that the last one expanded."""


class Jigsaw(Policy):
    """Multiplexes. Without one of its parts it is an ablation, which the benchmark measures."""

    keeps_terms = True

    def __init__(
        self,
        name: str = "jigsaw",
        *,
        search: Search = look_ahead,
        merges: bool = True,
        divides: bool = True,
        predicts: bool = True,
    ) -> None:
        """`search` chooses; `merges`: tails move together; `divides`: shares and holds, or equal
        shares for ever; `predicts`: from history, or all sub-stages are taken to last equally long."""
        self.name = name  # type: ignore[misc]
        self._search = search
        self._merges, self._divides, self._predicts = merges, divides, predicts

    def starts(self, state: State) -> list[Start]:
        """Every queued pipeline, as far as there are devices."""
        return start_all(state)

    def awaits(self, state: State) -> list[str]:
        """Those with merges to order, and one where a decision is due."""
        _notice(state)
        waiting = dict.fromkeys(state.outlooks.merges, True) | _due(state)
        return [name for name in waiting if state.pipelines[name].active]

    def workers(self, state: State, pipeline: Pipeline) -> Collection[str] | None:
        """Those that its step is planned with."""
        # Without prediction fewer workers would always look like less work.
        if self._merges and self._predicts and gather.begins(pipeline):
            own = dict.fromkeys(t.device for t in pipeline.tenants.values() if t.device is not None)
            budgets = _budgets(state, own)
            here = frozenset(budget.id for budget in budgets)
            within = gather.Surroundings(
                budgets=budgets,
                table=profiles.table(state),
                terms=lambda nodes: self._terms(state, nodes, here),
                max_hold_s=MAX_HOLD_S,
                searches=self._search is look_ahead,
            )
            num = gather.plan(
                state,
                pipeline,
                predict=lambda one, workers: self._predicted(one, here, workers),
                within=within,
            )
            state.outlooks.next_s = max(state.outlooks.next_s, state.clock.now_s + num * EXPANDED_S)
        version = -1 if pipeline.version is None else pipeline.version
        return pipeline.work.plans.get(version) or None

    def shares(self, state: State) -> Wanted:
        """Of the devices decided on now, and of those whose tenants changed: equal where nothing is
        predicted. Where ranks differ each time, since who comes first depends on who works."""
        memory = state.outlooks
        _forget(state, state.undivided, {})
        memory.due |= {d: True for d in state.undivided if state.residents.get(d)}
        late = list(memory.late)
        devices = dict(state.undivided) | dict.fromkeys(self._refresh(state), True)
        devices |= _living_at(state, set(late) ^ set(memory.late))
        devices |= dict.fromkeys(unequal(state), True)
        wanted = equal(state, devices=devices)
        return by_priority(
            state, {device: memory.wanted.get(device, even) for device, even in wanted.items()}
        )

    def longest_first(self, pipeline: Pipeline) -> bool:
        """Where a step waits for its longest sequence. Where batches overlap, an earlier step would
        wait for a later one's."""
        return not pipeline.spec.max_staleness

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        """All that a worker generates, where its tail merges with another's."""
        merges = state.outlooks.merges.get(pipeline.name, {}) if self._merges else {}
        moves = []
        for group in pipeline.groups.values() if merges else ():
            for sequence in group.sequences:
                if sequence.stage != "running" or sequence.owner is None:
                    continue
                target = merges.get(sequence.owner.id)
                stayed_s = state.clock.now_s - sequence.moved_s
                if target is not None and (not sequence.num_moves or stayed_s >= MIN_STAY_S):
                    name = ids.sequence_id(pipeline.name, group.number, sequence.index)
                    moves.append(Move(sequence=name, target=target))
        return moves

    def _refresh(self, state: State) -> list[str]:
        """Decide on the devices that are due; which."""
        memory, now_s = state.outlooks, state.clock.now_s
        _notice(state)
        if now_s < memory.next_s:
            return []
        devices = horizon.take(state, devices=_Online(state))
        state.dirty |= _due(state)
        here = frozenset(devices)
        pipelines = [state.pipelines[name] for name in _living_on(state, devices)]
        nodes = [node for pipeline in pipelines for node in self._predicted(pipeline, here)]
        if not nodes:
            _forget(state, here, {})
            return devices
        graph = Graph(nodes, devices=_budgets(state, sorted(devices)))
        ready = {node.id: node for node in graph.ready(())}
        _forget(state, here, ready)
        position = Position(
            graph,
            profiles.table(state),
            max_hold_s=MAX_HOLD_S,
            held_s={i: now_s - s for i, s in memory.held_since_s.items() if i in ready},
        )
        terms = self._terms(state, nodes, here)
        behind = {name: pace.late(promised) for name, promised in terms.items()}
        memory.late = [name for name in memory.late if name not in behind]
        memory.late += [name for name, is_late in behind.items() if is_late]
        decision = self._search(position, terms=terms, limits=LIMITS, touched=devices)
        _remember(state, decision, ready, graph.pipelines)
        if self._divides:
            memory.wanted |= _divided(state, devices, decision, ready)
        return devices

    def _predicted(
        self,
        pipeline: Pipeline,
        devices: frozenset[str] | None,
        workers: tuple[str, ...] | None = None,
    ) -> tuple[Node, ...]:
        if pipeline.version is None or rests(pipeline):
            return ()
        nodes = predict(
            pipeline.work,
            Outlook(
                pipeline=pipeline.name,
                version=pipeline.version,
                max_staleness=pipeline.spec.max_staleness,
                last_version=pipeline.spec.num_steps,
                ended=phases.Ended(pipeline),
                workers=workers,
                generating=pipeline.num_generating,
                move_s=None if pipeline.spec.max_staleness or not self._merges else MOVE_S,
                devices=devices,
            ),
        )
        return nodes if self._predicts else _equally_long(nodes)

    def _terms(
        self, state: State, nodes: Iterable[Node], devices: frozenset[str]
    ) -> dict[str, Terms]:
        """What the pipelines of these nodes were promised, and how far they are. The time alone of one
        with a cap is that of all its devices."""
        by_pipeline: dict[str, list[Node]] = {}
        for node in nodes:
            by_pipeline.setdefault(node.pipeline, []).append(node)
        terms, now_s, table = {}, state.clock.now_s, profiles.table(state)
        for name, own in by_pipeline.items():
            pipeline = state.pipelines[name]
            left: Collection[Node] = own
            if pipeline.spec.terms.max_slowdown is not None and not _lives_on(pipeline, devices):
                left = self._predicted(pipeline, None)
            terms[name] = pace.terms(pipeline, left, now_s=now_s, table=table)
        return terms


def _lives_on(pipeline: Pipeline, devices: frozenset[str]) -> bool:
    return all(t.device is None or t.device in devices for t in pipeline.tenants.values())


class _Online:
    """Devices that nodes offer, found by their node: a cluster may have thousands."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __contains__(self, device: object) -> bool:
        return isinstance(device, str) and self.find(device) is not None

    def find(self, device: str) -> Device | None:
        """By its id, ``<node>/<kind><index>``."""
        node = self._state.nodes.get(device.rpartition("/")[0])
        if node is None or not node.up:
            return None
        return next((d for d in node.devices if d.id == device), None)


def _budgets(state: State, devices: Iterable[str]) -> list[DeviceBudget]:
    """Of those that nodes offer: the memory that its residents leave."""
    online = _Online(state)
    return [
        DeviceBudget(id=name, memory_bytes=max(0, found.memory_bytes - _used(state, name)))
        for name in devices
        if (found := online.find(name)) is not None
    ]


def _used(state: State, device: str) -> int:
    total = 0
    for name in state.residents.get(device, ()):
        pipeline = state.pipelines[name.partition(".")[0]]
        total += pipeline.spec.memory.of(pipeline.tenants[name].role)
    return total


def _equally_long(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(
        node if node.kind == "barrier" else msgspec.structs.replace(node, work_s=EQUAL_S)
        for node in nodes
    )


def _notice(state: State) -> None:
    horizon.notice(state, max_hold_s=MAX_HOLD_S)


def _due(state: State) -> dict[str, bool]:
    """A pipeline that lives on the first device that waits for a decision."""
    names = (name for device in state.outlooks.due for name in state.residents.get(device, ()))
    first = next(names, None)
    return {} if first is None else {first.partition(".")[0]: True}


def _living_on(state: State, devices: list[str]) -> list[str]:
    """Pipelines, in order of submission."""
    found = {n.partition(".")[0] for d in devices for n in state.residents.get(d, ())}
    return [name for name in state.pipelines if name in found]


def _living_at(state: State, pipelines: Collection[str]) -> dict[str, bool]:
    """Devices on which any of these lives."""
    return {
        tenant.device: True
        for name in state.pipelines
        if name in pipelines
        for tenant in state.pipelines[name].tenants.values()
        if tenant.device is not None
    }


def _forget(state: State, devices: Collection[str], ready: dict[str, Node]) -> None:
    """What was decided before on these devices: shares, merges from them, holds of what is no longer
    ready."""
    memory = state.outlooks
    if not devices:
        return

    here = {name.partition(".")[0] for d in devices for name in state.residents.get(d, ())}
    away = {p.name for p in state.pipelines.values() if p.active and p.name not in here}

    def elsewhere(tenant: str) -> bool:
        if tenant.partition(".")[0] in away:
            return True
        found = shares.find(state, tenant)
        return found is not None and found.device not in devices

    for device in devices:
        memory.wanted.pop(device, None)
    memory.held_since_s = {
        id: since_s
        for id, since_s in memory.held_since_s.items()
        if id in ready or elsewhere(horizon.tenant_of(id))
    }
    kept = {
        name: merges
        if name in away
        else {source: target for source, target in merges.items() if elsewhere(source)}
        for name, merges in memory.merges.items()
    }
    memory.merges = {name: merges for name, merges in kept.items() if merges}


def _remember(
    state: State, decision: Decision, ready: dict[str, Node], pipelines: Iterable[str]
) -> None:
    memory, now_s = state.outlooks, state.clock.now_s
    for id, share in decision.shares.items():
        if share > 0:
            memory.held_since_s.pop(id, None)
        else:
            memory.held_since_s.setdefault(id, now_s)
    memory.next_s = now_s + decision.num_expanded * EXPANDED_S
    memory.decisions.append(
        Decided(
            now_s=now_s,
            shares=decision.shares,
            moves=decision.moves,
            makespan_s=decision.makespan_s,
            default_makespan_s=decision.default_makespan_s,
            num_expanded=decision.num_expanded,
            until={name: _end(state.pipelines[name]) for name in pipelines},
            num_candidates=decision.num_candidates,
        )
    )
    del memory.decisions[:-MAX_DECISIONS]
    for name, merges in _merged(state, decision, ready).items():
        memory.merges.setdefault(name, {}).update(merges)


def _end(pipeline: Pipeline) -> int:
    """The version with which its predicted steps end."""
    assert pipeline.version is not None
    return min(pipeline.version + HORIZON_STEPS, pipeline.spec.num_steps)


def _divided(
    state: State, devices: list[str], decision: Decision, ready: dict[str, Node]
) -> Wanted:
    """Shares of tenants: what their ready nodes got, and a little for those that have none."""
    by_tenant: dict[str, float] = {}
    for id, share in decision.shares.items():
        if id in ready and id not in decision.moves:
            tenant = horizon.tenant_of(id)
            by_tenant[tenant] = max(by_tenant.get(tenant, 0.0), share)
    wanted: Wanted = {}
    for device, tenants in equal(state, devices=devices).items():
        decided = {name: by_tenant[name] for name in tenants if name in by_tenant}
        if not any(decided.values()):
            continue
        idle = [name for name in tenants if name not in decided]
        scale = (1 - FLOOR_SHARE * len(idle)) / max(1.0, sum(decided.values()))
        if scale <= 0:
            continue
        divided = {name: share * scale for name, share in decided.items()}
        wanted[device] = divided | dict.fromkeys(idle, FLOOR_SHARE)
    return wanted


def _merged(state: State, decision: Decision, ready: dict[str, Node]) -> dict[str, dict[str, str]]:
    merges: dict[str, dict[str, str]] = {}
    for id, device in decision.moves.items():
        if id not in ready:
            continue
        pipeline = state.pipelines[ready[id].pipeline]
        targets = [t for t in pipeline.usable("rollout") if t.device == device]
        source = horizon.tenant_of(id)
        if targets and targets[0].id != source:
            merges.setdefault(pipeline.name, {})[source] = targets[0].id
    return merges
