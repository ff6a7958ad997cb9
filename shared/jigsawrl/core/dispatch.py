"""Who makes which prompt, generates which sequence and scores which sample: orders, their leases,
and what happens when a lease runs out."""

from __future__ import annotations

from collections.abc import Collection

from jigsawrl.contract.commands import (
    Drop,
    GroupOrder,
    MakeGroups,
    Placement,
    PlaceSequences,
    ScoreOrder,
    ScoreSequences,
)
from jigsawrl.contract.message import Role
from jigsawrl.core import admission, ids, tally
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.groups import reclaim, reclaim_prompt
from jigsawrl.core.migration import EXPORT_LEASE_S
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.state import Pipeline, State, Tenant

ACCEPT_LEASE_S = 5.0
"""A placement is confirmed within this, or goes elsewhere."""

ORDER_LEASE_S = 30.0
"""A prompt is made, or a sample scored, within this, or the order is repeated under a new epoch."""

LEASES_S = {"placed": ACCEPT_LEASE_S, "moving": EXPORT_LEASE_S, "scoring": ORDER_LEASE_S}
"""Of a sequence, by stage."""


def make(pipeline: Pipeline, now_s: float, outbox: Outbox) -> None:
    """Order prompts from the environment with the least to do."""
    tenant = least_loaded(pipeline, "environment")
    if tenant is None or not pipeline.to_make:
        return
    orders = []
    for number in pipeline.to_make:
        group = pipeline.groups.get(number)
        if group is None or group.prompt is not None or group.owner is not None:
            continue
        group.owner = tenant.worker
        group.since_s = now_s
        name = ids.group_id(pipeline.name, number)
        orders.append(GroupOrder(group=name, epoch=group.epoch, cursor=group.cursor))
    pipeline.to_make = []
    if orders:
        outbox.add(MakeGroups(**outbox.to(tenant.worker), orders=tuple(orders)))


def place(
    pipeline: Pipeline,
    now_s: float,
    outbox: Outbox,
    *,
    workers: Collection[str] | None = None,
    longest_first: bool = False,
) -> None:
    """Place waiting sequences: those that moved where they were to go, of each group the others
    together on one of the `workers`, or of all where none of these is there."""
    ready = pipeline.usable("rollout")
    if pipeline.version is None or not pipeline.to_place or not ready:
        return
    oldest = admission.oldest_versions(pipeline)
    loads = {tenant.id: pipeline.num_generating.get(tenant.id, 0) for tenant in ready}
    chosen_from = [t for t in ready if workers is None or t.id in workers] or ready
    chosen: dict[str, list[Placement]] = {}
    left = []
    for number in sorted(pipeline.to_place):
        group = pipeline.groups.get(number)
        if group is None:
            continue
        for waiting in _together(group):
            needed = max(oldest[number], *(s.resume_version for s in waiting))
            tenant = _choose(pipeline, waiting, chosen_from, ready, needed=needed, loads=loads)
            if tenant is None:
                left.append(number)
                continue
            loads[tenant.id] += len(waiting)
            for sequence in waiting:
                placement = _placement(pipeline, group, sequence, version=oldest[number])
                chosen.setdefault(tenant.id, []).append(placement)
                _own(pipeline, sequence, tenant, now_s=now_s)
    pipeline.to_place = list(dict.fromkeys(left))
    if chosen and pipeline.placed_since_s is None:
        pipeline.placed_since_s = now_s
    for name, placements in chosen.items():
        outbox.add(
            PlaceSequences(
                **outbox.to(pipeline.tenants[name].worker),
                incarnation=pipeline.incarnation,
                placements=tuple(placements),
                longest_first=longest_first,
            )
        )


def _together(group: Group) -> list[list[Sequence]]:
    """The waiting sequences of a group by where they go."""
    by_target: dict[str | None, list[Sequence]] = {}
    for sequence in group.sequences:
        if sequence.stage == "waiting":
            by_target.setdefault(sequence.target, []).append(sequence)
    return list(by_target.values())


def _choose(
    pipeline: Pipeline,
    waiting: list[Sequence],
    workers: list[Tenant],
    ready: list[Tenant],
    *,
    needed: int,
    loads: dict[str, int],
) -> Tenant | None:
    """Who generates them: their target while it lives, else the one of `workers` with the least to do;
    None while it loads the version `needed`. Without a target they wait while any of `workers` still
    loads such weights in time, so that the load is balanced."""

    def holds(tenant: Tenant) -> bool:
        return _holds(tenant, pipeline.incarnation, needed)

    target = next((t for t in ready if t.id == waiting[0].target), None)
    if target is not None and (holds(target) or not target.load_late):
        return target if holds(target) else None
    fit = [t for t in workers if holds(t)]
    if any(not t.load_late and not holds(t) for t in workers):
        return None
    if not fit:
        fit = [t for t in ready if holds(t)]  # the chosen ones are late with their weights
    if not fit:
        return None
    avoid = {s.avoid for s in waiting}
    return min(fit, key=lambda t: (t.id in avoid, loads[t.id]))


def _holds(tenant: Tenant, incarnation: int, oldest: int) -> bool:
    version = -1 if tenant.version is None else tenant.version
    return tenant.incarnation == incarnation and version >= oldest


def _own(pipeline: Pipeline, sequence: Sequence, tenant: Tenant, *, now_s: float) -> None:
    tally.leave(pipeline, sequence)
    sequence.stage = "placed"
    sequence.owner = tenant.worker
    tally.enter(pipeline, sequence)
    sequence.target = None
    sequence.since_s = now_s
    sequence.max_version = tenant.version
    if sequence.min_version is None:
        sequence.min_version = tenant.version


def _placement(pipeline: Pipeline, group: Group, sequence: Sequence, *, version: int) -> Placement:
    assert group.prompt is not None
    return Placement(
        sequence=ids.sequence_id(pipeline.name, group.number, sequence.index),
        epoch=sequence.epoch,
        group=group.prompt,
        seed=ids.sequence_seed(pipeline.spec.seed, group.cursor, sequence.index),
        resume=sequence.resume,
        min_version=max(version, sequence.resume_version),
    )


def score(pipeline: Pipeline, now_s: float, outbox: Outbox) -> None:
    """Order scores from the reward service with the least to do."""
    tenant = least_loaded(pipeline, "reward")
    if tenant is None or not pipeline.to_score:
        return
    orders = []
    for number, index in pipeline.to_score:
        group = pipeline.groups.get(number)
        if group is None or group.sequences[index].stage != "finished":
            continue
        sequence = group.sequences[index]
        assert group.prompt is not None
        assert sequence.record is not None
        sequence.stage = "scoring"
        sequence.owner = tenant.worker
        sequence.since_s = now_s
        name = ids.sequence_id(pipeline.name, number, index)
        orders.append(
            ScoreOrder(
                sequence=name, epoch=sequence.epoch, group=group.prompt, record=sequence.record
            )
        )
    pipeline.to_score = []
    if orders:
        outbox.add(ScoreSequences(**outbox.to(tenant.worker), orders=tuple(orders)))


def drop(pipeline: Pipeline, outbox: Outbox) -> None:
    """Tell workers what to forget."""
    for name, sequences in pipeline.drops.items():
        tenant = pipeline.tenants.get(name)
        if tenant is not None and tenant.usable:
            outbox.add(Drop(**outbox.to(tenant.worker), sequences=tuple(sequences)))
    pipeline.drops = {}


def expire(state: State, pipeline: Pipeline) -> None:
    """Take back work whose lease has run out."""
    clock = state.clock
    for group in pipeline.groups.values():
        if group.owner is not None and clock.expired(group.since_s, term_s=ORDER_LEASE_S):
            reclaim_prompt(pipeline, group)
            state.touch(pipeline)
        for sequence in group.sequences:
            term_s = LEASES_S.get(sequence.stage)
            if term_s is not None and clock.expired(sequence.since_s, term_s=term_s):
                if sequence.stage != "scoring" and sequence.owner is not None:
                    sequence.avoid = sequence.owner.id
                reclaim(pipeline, group, sequence)
                state.touch(pipeline)


def num_held(pipeline: Pipeline, tenants: list[Tenant]) -> dict[str, int]:
    """Sequences or orders that each of these works on."""
    counts = {tenant.id: 0 for tenant in tenants}
    for group in pipeline.groups.values():
        if group.owner is not None and group.owner.id in counts:
            counts[group.owner.id] += 1
        for sequence in group.sequences:
            if sequence.owner is not None and sequence.owner.id in counts:
                counts[sequence.owner.id] += 1
    return counts


def least_loaded(pipeline: Pipeline, role: Role) -> Tenant | None:
    """The usable tenant of a role with the least to do; None where there is none."""
    tenants = pipeline.usable(role)
    if len(tenants) < 2:
        return tenants[0] if tenants else None
    counts = num_held(pipeline, tenants)
    return min(tenants, key=lambda t: counts[t.id])
