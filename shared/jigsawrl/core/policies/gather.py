"""How many of a pipeline's rollout workers generate its next step, and which.

Called by `jigsaw` when a synchronous step begins, before its sequences are placed. Beside other
pipelines fewer workers can be better than all (`core/gathering`); alone they never are. Every choice is
judged as a decision is: by playing the next steps of the pipelines that live on its devices.

Where one of these has no history yet nothing can be played. Then each of them generates on its part of
the workers, on devices apart as far as there are enough: a decode iteration over twice the sequences
costs less than two, so that as long as all generate, this is less work for the same devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from jigsawrl.core.graph import DeviceBudget, Graph, Node
from jigsawrl.core.lookahead import MIN_PLAYS, Limits, Listed, Terms, listed
from jigsawrl.core.pipelines import rests
from jigsawrl.core.play import Position
from jigsawrl.core.slowdown import SlowdownTable
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.work_history import expect_generation

MAX_DEVICES = 8
"""Steps of pipelines that live on more are not planned: judging one choice costs what its devices do,
and tails still merge in mid-step."""

MAX_SINGLE = 4
"""Up to so many workers each is tried alone; of more, only those whose devices have least to do."""

LEAST_GAIN = 0.02
"""Of the predicted cost: less is no reason to generate elsewhere than in the step before. What is
expected of workers that did not generate lately is less certain than that."""

PLAYED_NODES = 200
"""Of one choice: the far end of a longer graph is a guess anyway. In a shorter one as many may end in
a search for what look-ahead would do after that choice: a tail that is in the way can move."""

Predict = Callable[[Pipeline, tuple[str, ...] | None], tuple[Node, ...]]
"""Nodes on these devices of a pipeline's next steps, where these workers generate those that are not
planned yet."""


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """What choices are judged by."""

    budgets: list[DeviceBudget]
    """Of the devices of the pipeline that are there."""
    table: SlowdownTable
    terms: Callable[[Iterable[Node]], dict[str, Terms]]
    """What the pipelines of these nodes were promised."""
    max_hold_s: float
    searches: bool = True
    """Whether decisions look ahead: else a choice must not count on what they would find."""


def begins(pipeline: Pipeline) -> bool:
    """A step of which nothing is placed yet, nor planned. Where batches overlap there is no such
    moment."""
    history = pipeline.work
    return (
        pipeline.version is not None
        and pipeline.version not in history.plans
        and pipeline.spec.max_staleness == 0
        and pipeline.open_cut is None
        and bool(pipeline.groups)
        and all(s.stage == "waiting" for g in pipeline.groups.values() for s in g.sequences)
    )


def plan(state: State, pipeline: Pipeline, *, predict: Predict, within: Surroundings) -> int:
    """Choose the workers of the step that begins and remember them; nodes expanded for it."""
    assert pipeline.version is not None
    workers = [t.id for t in pipeline.usable("rollout") if t.device is not None]
    best: tuple[str, ...] = ()
    num_expanded = 0
    neighbours: list[Pipeline] = []
    if len(workers) > 1 and len(within.budgets) <= MAX_DEVICES:
        neighbours = _neighbours(state, pipeline)
    if any(not one.work.num_steps for one in (pipeline, *neighbours)):
        best = _part(pipeline, workers, neighbours)
    elif neighbours:
        best, num_expanded = _best(pipeline, workers, neighbours, predict=predict, within=within)
    plan = list(best) if len(best) < len(workers) else []
    pipeline.work.plans[pipeline.version] = pipeline.work.newest_plan = plan
    return num_expanded


def _best(
    pipeline: Pipeline,
    workers: list[str],
    neighbours: list[Pipeline],
    *,
    predict: Predict,
    within: Surroundings,
) -> tuple[tuple[str, ...], int]:
    """The workers with which all get on best, and the nodes expanded to find them."""
    best: tuple[str, ...] = ()
    num_expanded, cost = 0, None
    others = [node for other in neighbours for node in predict(other, None)]
    for choice in _choices(pipeline, workers, others) if others else ():
        found = _judge((*predict(pipeline, choice), *others), pipeline, within)
        if found is None:
            break
        num_expanded += found.num_expanded
        if cost is None or _clearly_less(found.cost, cost):
            best, cost = choice, found.cost
    return best, num_expanded


def _part(pipeline: Pipeline, workers: list[str], neighbours: list[Pipeline]) -> tuple[str, ...]:
    """An equal part of the workers, those first whose devices the others use least: to generate, and
    where that is equal, to train."""
    for name in workers:
        expect_generation(pipeline.work, name, device=pipeline.tenants[name].device)
    active = [other for other in neighbours if other.stage == "running"]
    generating = Counter(d for other in active for d in _generating_on(other))
    training = Counter(
        tenant.device
        for other in active
        for tenant in other.tenants.values()
        if tenant.role == "trainer"
    )
    devices = {name: pipeline.tenants[name].device for name in workers}
    order = sorted(workers, key=lambda name: (generating[devices[name]], training[devices[name]]))
    return tuple(order[: max(1, len(workers) // (1 + len(active)))])


def _generating_on(pipeline: Pipeline) -> list[str | None]:
    """Devices of the workers of its newest plan, or of all."""
    plans = pipeline.work.plans
    plan = plans[max(plans)] if plans else []
    return [
        tenant.device
        for tenant in pipeline.tenants.values()
        if tenant.role == "rollout" and (not plan or tenant.id in plan)
    ]


def _neighbours(state: State, pipeline: Pipeline) -> list[Pipeline]:
    """Others that live on its devices; not those that meet only these, or a whole cluster would be
    predicted for one step."""
    devices = {t.device for t in pipeline.tenants.values() if t.device is not None}
    found = {n.partition(".")[0] for d in devices for n in state.residents.get(d, ())}
    return [
        other
        for other in state.pipelines.values()
        if other is not pipeline and other.name in found and not rests(other)
    ]


def _choices(pipeline: Pipeline, workers: list[str], others: list[Node]) -> list[tuple[str, ...]]:
    """Those of the step before first; then all, half of them, and so on, those first whose devices
    others need least."""
    load_s: dict[str | None, float] = {}
    for node in others:
        load_s[node.device] = load_s.get(node.device, 0.0) + node.work_s
    order = sorted(workers, key=lambda name: load_s.get(pipeline.tenants[name].device, 0.0))
    choices = [tuple(workers)]
    num = len(workers) // 2
    while num:
        choices.append(tuple(order[:num]))
        num //= 2
    if len(workers) <= MAX_SINGLE:
        choices += [(name,) for name in order[1:]]
    before = frozenset(pipeline.work.newest_plan)
    return sorted(choices, key=lambda choice: before != frozenset(choice))


def _judge(nodes: tuple[Node, ...], pipeline: Pipeline, within: Surroundings) -> Listed | None:
    """None where nothing on a known device can be predicted."""
    if all(n.device is None for n in nodes if n.pipeline == pipeline.name):
        return None
    graph = Graph(nodes, devices=within.budgets)
    position = Position(graph, within.table, max_hold_s=within.max_hold_s)
    limits = Limits(max_expanded=PLAYED_NODES * MIN_PLAYS)
    max_searched = PLAYED_NODES if within.searches else 0
    terms = within.terms(nodes)
    return listed(position, terms=terms, limits=limits, max_searched=max_searched)


def _clearly_less(cost: tuple[float, ...], than: tuple[float, ...]) -> bool:
    for one, other in zip(cost, than, strict=True):
        if min(one, other) < (1 - LEAST_GAIN) * max(one, other):
            return one < other
    return False
