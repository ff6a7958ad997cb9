"""`jigsaw`: all pipelines at once; shares, holds and merges by look-ahead on the Sub-Stage Graph.

Source: JigsawRL (arXiv 2604.23838), sub-stage multiplexing, merging and look-ahead scheduling; the
deviations are those of `graph`, `play` and `lookahead`. Before any history: equal shares, no holds.

A situation is decided on once: when what some tenant does changes, or a hold has lasted. Then the next
steps of all pipelines that meet on a device are predicted, joined into one graph, and searched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from jigsawrl.core import ids, pace, phases, profiles
from jigsawrl.core.graph import DeviceBudget, Graph, Node, around
from jigsawrl.core.lookahead import Decision, Limits, Search, Terms, look_ahead
from jigsawrl.core.migration import MIN_STAY_S, Move
from jigsawrl.core.outlook import MAX_DECISIONS, Decided
from jigsawrl.core.play import Position
from jigsawrl.core.policies import gather
from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.placement import Occupancy
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.prediction import HORIZON_STEPS, Outlook, predict
from jigsawrl.core.shares import Wanted, equal
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.terms import FLOOR_SHARE, by_priority

MAX_HOLD_S = 2.0
"""A ready sub-stage waits for others no longer than this in all: about a step of a small model."""

MOVE_S = 0.05
"""Full-speed seconds of prefill that a merge costs: `jigsaw bench migration` prints 0.04 for one
sequence of 378 tokens and 0.24 for eight, on a slot."""

EQUAL_S = 0.5
"""What every sub-stage is taken to last where nothing is predicted."""

EXPANDED_S = 50e-6
"""Stream time that a decision waits per node that the last one expanded."""


class Jigsaw(Policy):
    """Multiplexes. Without one of its parts it is an ablation, which the benchmark measures."""

    every_tick = True
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

    def workers(self, state: State, pipeline: Pipeline) -> Collection[str] | None:
        """Those that its step is planned with."""
        if self._merges and gather.begins(pipeline):
            within = gather.Surroundings(
                budgets=_budgets(state),
                table=profiles.table(state),
                terms=lambda nodes: _terms(state, nodes),
                max_hold_s=MAX_HOLD_S,
            )
            num = gather.plan(state, pipeline, predict=self._predicted, within=within)
            state.outlooks.next_s = max(state.outlooks.next_s, state.clock.now_s + num * EXPANDED_S)
        version = -1 if pipeline.version is None else pipeline.version
        return pipeline.work.plans.get(version) or None

    def shares(self, state: State) -> Wanted:
        """By the last decision; equal where nothing is predicted; higher priorities first."""
        self._refresh(state)
        return by_priority(state, equal(state) | (_still_there(state) if self._divides else {}))

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

    def _refresh(self, state: State) -> None:
        """Decide, where the situation is a new one."""
        memory, now_s = state.outlooks, state.clock.now_s
        signature = _signature(state)
        if signature == memory.signature or now_s < memory.next_s:
            return
        memory.signature = signature
        memory.wanted, memory.merges, memory.late = {}, {}, []
        nodes = [node for p in state.pipelines.values() if p.active for node in self._predicted(p)]
        budgets = _budgets(state)
        known = {budget.id for budget in budgets}
        nodes = [node for node in nodes if node.device is None or node.device in known]
        if not nodes:
            return
        touched = {node.device for node in nodes if node.device is not None}
        graph = Graph(around(nodes, devices=touched), devices=budgets)
        ready = {node.id: node for node in graph.ready(())}
        memory.held_since_s = {i: s for i, s in memory.held_since_s.items() if i in ready}
        position = Position(
            graph,
            profiles.table(state),
            max_hold_s=MAX_HOLD_S,
            held_s={i: now_s - since_s for i, since_s in memory.held_since_s.items()},
        )
        terms = _terms(state, graph.nodes)
        memory.late = [name for name, promised in terms.items() if pace.late(promised)]
        decision = self._search(position, terms=terms, limits=Limits(), touched=touched)
        _remember(state, decision, ready, graph.pipelines)

    def _predicted(
        self, pipeline: Pipeline, workers: tuple[str, ...] | None = None
    ) -> tuple[Node, ...]:
        if pipeline.version is None:
            return ()
        nodes = predict(
            pipeline.work,
            Outlook(
                pipeline=pipeline.name,
                version=pipeline.version,
                max_staleness=pipeline.spec.max_staleness,
                last_version=pipeline.spec.num_steps,
                ended=phases.ended(pipeline),
                workers=workers,
                move_s=None if pipeline.spec.max_staleness or not self._merges else MOVE_S,
            ),
        )
        return nodes if self._predicts else _equally_long(nodes)


def _terms(state: State, nodes: Iterable[Node]) -> dict[str, Terms]:
    """What the pipelines of these nodes were promised, and how far they are."""
    by_pipeline: dict[str, list[Node]] = {}
    for node in nodes:
        by_pipeline.setdefault(node.pipeline, []).append(node)
    return {
        name: pace.terms(
            state.pipelines[name], own, now_s=state.clock.now_s, table=profiles.table(state)
        )
        for name, own in by_pipeline.items()
    }


def _budgets(state: State) -> list[DeviceBudget]:
    occupancy = Occupancy(p for p in state.pipelines.values() if p.live)
    return [
        DeviceBudget(id=device.id, memory_bytes=max(0, occupancy.free_bytes(device)))
        for node in state.nodes.values()
        if node.up
        for device in node.devices
    ]


def _equally_long(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return tuple(msgspec.structs.replace(node, work_s=EQUAL_S) for node in nodes)


def _signature(state: State) -> str:
    """What every tenant does, in which step."""
    parts = []
    for pipeline in state.pipelines.values():
        if pipeline.active:
            kinds = sorted(phases.current_kinds(pipeline).items())
            parts.append(f"{pipeline.name} {pipeline.version} {pipeline.work.num_steps} {kinds}")
    overdue = sum(
        state.clock.now_s - since_s >= MAX_HOLD_S
        for since_s in state.outlooks.held_since_s.values()
    )
    return f"{parts} {overdue}"


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
    memory.wanted = _divided(state, decision, ready)
    memory.merges = _merged(state, decision, ready)


def _end(pipeline: Pipeline) -> int:
    """The version with which its predicted steps end."""
    assert pipeline.version is not None
    return min(pipeline.version + HORIZON_STEPS, pipeline.spec.num_steps)


def _divided(state: State, decision: Decision, ready: dict[str, Node]) -> Wanted:
    """Shares of tenants: what their ready nodes got, and a little for those that have none."""
    by_tenant: dict[str, float] = {}
    for id, share in decision.shares.items():
        if id in ready and id not in decision.moves:
            tenant = _tenant(id)
            by_tenant[tenant] = max(by_tenant.get(tenant, 0.0), share)
    wanted: Wanted = {}
    for device, tenants in equal(state).items():
        decided = {name: by_tenant[name] for name in tenants if name in by_tenant}
        if not any(decided.values()):
            continue
        idle = [name for name in tenants if name not in decided]
        scale = (1 - FLOOR_SHARE * len(idle)) / max(1.0, sum(decided.values()))
        if scale <= 0:
            continue
        shares = {name: share * scale for name, share in decided.items()}
        wanted[device] = shares | dict.fromkeys(idle, FLOOR_SHARE)
    return wanted


def _merged(state: State, decision: Decision, ready: dict[str, Node]) -> dict[str, dict[str, str]]:
    merges: dict[str, dict[str, str]] = {}
    for id, device in decision.moves.items():
        if id not in ready:
            continue
        pipeline = state.pipelines[ready[id].pipeline]
        targets = [t for t in pipeline.usable("rollout") if t.device == device]
        if targets and targets[0].id != _tenant(id):
            merges.setdefault(pipeline.name, {})[_tenant(id)] = targets[0].id
    return merges


def _still_there(state: State) -> Wanted:
    """The decided division of devices that still have the same tenants."""
    now = equal(state)
    wanted = state.outlooks.wanted
    return {
        device: shares
        for device, shares in wanted.items()
        if device in now and shares.keys() == now[device].keys()
    }


def _tenant(node: str) -> str:
    """Of a node's id, ``<pipeline>/v<version>/<tenant>/<kind>``."""
    return node.split("/")[2]
