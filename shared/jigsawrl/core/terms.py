"""What pipelines were promised (`TermsSpec`): which goes first, and which promises contradict.

Policies ask `in_order` whom to start first and `by_priority` how to divide a device; the command and
the scheduler ask `contradiction` before a pipeline runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from jigsawrl.contract.spec import PipelineSpec
from jigsawrl.core import phases
from jigsawrl.core.shares import Wanted
from jigsawrl.core.slowdown import MISSING_PAIR_FACTOR
from jigsawrl.core.state import Pipeline, State

FLOOR_SHARE = 0.05
"""Of a tenant that others precede, or of which nothing is predicted, so that no one starves."""

FLOOR_SLOWDOWN = round(1 / (FLOOR_SHARE * MISSING_PAIR_FACTOR), 6)
"""Of one that always has its floor only, beside a kind that costs it a fifth: what can be promised
next to a higher priority."""

Rank = tuple[int, bool]
"""Priority, and whether the pipeline is behind its latency cap."""


def in_order(pipelines: Iterable[Pipeline]) -> list[Pipeline]:
    """Highest priority first; of equal ones the one submitted first."""
    return sorted(pipelines, key=lambda pipeline: -pipeline.spec.terms.priority)


def contradiction(
    spec: PipelineSpec, others: Iterable[PipelineSpec], *, policy: str, keeps_terms: bool
) -> str | None:
    """Why `spec` can't be promised what it asks for next to `others` that have not ended; one line
    that says what to do. `keeps_terms`: the policy heeds weights and caps."""
    if not keeps_terms:
        asked = "weight" if spec.terms.weight != 1 else None
        asked = asked if spec.terms.max_slowdown is None else "max_slowdown"
        if asked is not None:
            return (
                f"scheduling.{asked} of pipeline {spec.name} has no effect with --policy {policy}:"
                " remove it, or use --policy jigsaw"
            )
    for other in others:
        low, high = sorted((spec, other), key=lambda one: one.terms.priority)
        cap = low.terms.max_slowdown
        if low.terms.priority < high.terms.priority and cap is not None and cap < FLOOR_SLOWDOWN:
            return (
                f"scheduling.max_slowdown {cap:g} of pipeline {low.name} can't be kept next to"
                f" pipeline {high.name}, whose priority {high.terms.priority} is above its"
                f" {low.terms.priority}: give both the same priority, or raise max_slowdown to"
                f" {FLOOR_SLOWDOWN:g}, which the share of {FLOOR_SHARE:g} that it always has allows"
            )
    return None


def unequal(state: State) -> list[str]:
    """Devices on which tenants of different ranks live: who comes first there depends on who works."""
    ranks = _ranks(state)
    if len(set(ranks.values())) < 2:
        return []
    return [
        device
        for device, names in state.residents.items()
        if len({ranks[name.partition(".")[0]] for name in names}) > 1
    ]


def by_priority(state: State, wanted: Wanted) -> Wanted:
    """On each device the tenants of the highest rank that work now have all but the floor of each
    other tenant, divided as in `wanted`, which stays where ranks are equal. Of equal priorities, a
    pipeline behind its latency cap ranks above the others."""
    ranks = _ranks(state)
    if len(set(ranks.values())) < 2:
        return wanted
    return {device: _precede(state, shares, ranks) for device, shares in wanted.items()}


def _ranks(state: State) -> dict[str, Rank]:
    """By active pipeline."""
    late = state.outlooks.late
    active = (pipeline for pipeline in state.pipelines.values() if pipeline.active)
    return {p.name: (p.spec.terms.priority, p.name in late) for p in active}


def _works(state: State, name: str) -> bool:
    pipeline = state.pipelines[name.partition(".")[0]]
    # Before its first version a trainer may warm up: nobody tells, so all count as working.
    starting = pipeline.version is None
    return starting or phases.kind_of(pipeline, pipeline.tenants[name]) is not None


def _precede(state: State, shares: dict[str, float], ranks: dict[str, Rank]) -> dict[str, float]:
    rank = {name: ranks[name.partition(".")[0]] for name in shares}
    if len(set(rank.values())) < 2:
        return shares
    works = {name for name in shares if _works(state, name)}
    if not works:  # a hold that was meant for one of higher rank must not outlast it
        return dict.fromkeys(shares, 1 / len(shares))
    top = max(rank[name] for name in works)
    first = {name: share for name, share in shares.items() if name in works and rank[name] == top}
    left = 1 - FLOOR_SHARE * (len(shares) - len(first))
    if left <= FLOOR_SHARE * len(first):
        return dict.fromkeys(shares, 1 / len(shares))
    total = sum(first.values())
    return {
        name: FLOOR_SHARE
        if name not in first
        else left * first[name] / total
        if total > 0
        else left / len(first)
        for name in shares
    }
