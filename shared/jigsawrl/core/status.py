"""What people are told: counts, workers, and what the next step waits for, by id."""

from __future__ import annotations

from jigsawrl.contract.requests import FateCounts, NodeStatus, PipelineStatus, WorkerStatus
from jigsawrl.core import ids, room
from jigsawrl.core.dispatch import num_held
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.introduction import Introduction
from jigsawrl.core.pipelines import rests, running_s
from jigsawrl.core.state import FATES, Pipeline, State, Tenant

MAX_IDS = 3
"""Ids named per cause, enough to look one up and to fit a table's cell; the rest is counted."""


def pipeline_status(state: State, pipeline: Pipeline) -> PipelineStatus:
    """One pipeline, now."""
    held = loads(pipeline)
    return PipelineStatus(
        pipeline=pipeline.name,
        state=pipeline.stage,
        version=pipeline.version or 0,
        incarnation=pipeline.incarnation,
        num_steps=pipeline.spec.num_steps,
        groups=_group_counts(pipeline),
        sequences=_sequence_counts(pipeline),
        evaluations=tuple(pipeline.evaluations),
        num_evaluations_skipped=len(pipeline.evaluations_skipped),
        metrics=pipeline.metrics,
        num_trained_tokens=pipeline.num_trained_tokens,
        running_s=running_s(state, pipeline),
        waiting_for=tuple(waiting_for(state, pipeline)),
        workers=tuple(_worker_status(t, held[t.id]) for t in pipeline.tenants.values()),
        failure=pipeline.failure,
        paused=pipeline.paused,
        num_migrations=pipeline.num_migrations,
        num_migrated_tokens=pipeline.num_migrated_tokens,
        num_tokens_again=pipeline.num_tokens_again,
        num_ignored=pipeline.num_ignored,
    )


def node_statuses(state: State) -> list[NodeStatus]:
    """All machines that were heard of, in the order of their names."""
    return [_node_status(state, name) for name in sorted({*state.nodes, *state.introductions})]


def _node_status(state: State, name: str) -> NodeStatus:
    node, said = state.nodes.get(name), state.introductions.get(name)
    said = said or Introduction(boot="", schema=state.schema, code_version="")
    is_up = node is not None and node.up
    return NodeStatus(
        node=name,
        state="refused"
        if said.refused is not None
        else "up"
        if is_up
        else "left"
        if said.left
        else "away",
        devices=() if node is None else tuple(device.id for device in node.devices),
        schema_version=said.schema,
        code_version=said.code_version,
        silent_s=0.0 if node is None else state.clock.now_s - node.seen_s,
        clock_skew_s=said.clock_skew_s,
        refused=said.refused,
    )


def loads(pipeline: Pipeline) -> dict[str, int]:
    """By tenant: sequences, orders or cuts that it works on."""
    held = num_held(pipeline, list(pipeline.tenants.values()))
    cut = pipeline.open_cut
    if cut is not None and cut.sent_gang == pipeline.gang_epoch:  # not one that a pause keeps back
        held |= {rank.id: 1 for rank in pipeline.gang}
    return held


def in_flight(pipeline: Pipeline) -> list[Group]:
    """Groups that have met no fate yet."""
    cut = pipeline.open_cut
    return [*(cut.groups if cut else ()), *pipeline.groups.values()]


def _group_counts(pipeline: Pipeline) -> FateCounts:
    fates = {str(fate): len(pipeline.group_fates[fate]) for fate in FATES}
    return FateCounts(admitted=pipeline.num_admitted, in_flight=len(in_flight(pipeline)), **fates)


def _sequence_counts(pipeline: Pipeline) -> FateCounts:
    fates = {str(fate): len(pipeline.sequence_fates[fate]) for fate in FATES}
    return FateCounts(
        admitted=pipeline.num_admitted * pipeline.spec.group_size,
        in_flight=sum(len(group.sequences) for group in in_flight(pipeline)),
        **fates,
    )


def _worker_status(tenant: Tenant, num_held: int) -> WorkerStatus:
    return WorkerStatus(
        worker=tenant.id,
        role=tenant.role,
        device=tenant.device,
        state="lost"
        if tenant.lost
        else "ready"
        if tenant.ready
        else "starting"
        if tenant.boot is None
        else "configuring",
        version=tenant.version,
        num_held=num_held,
        share=tenant.applied_share,
        code_version=tenant.code_version,
    )


# --- Waiting -------------------------------------------------------------------------------------


def waiting_for(state: State, pipeline: Pipeline) -> list[str]:
    """One entry a cause, for a pipeline that has not ended."""
    if not pipeline.live:
        return []
    if pipeline.stage == "queued":
        return room.waits_for(state, pipeline)
    causes = [_tenant_wait(state, t) for t in pipeline.tenants.values() if not t.usable]
    if pipeline.waits_for is not None and (pipeline.paused or _has_more_to_place(pipeline)):
        causes.append(pipeline.waits_for)
    if pipeline.version is None:
        return causes or [f"the first weights of {_trainer(pipeline)}"]
    cut = pipeline.open_cut
    if cut is not None and not rests(pipeline):
        causes.append(f"step {cut.version} on {_trainer(pipeline)}")
    causes += _work(pipeline)
    if pipeline.stage == "finishing":
        causes += _ending(pipeline)
    return causes


def _tenant_wait(state: State, tenant: Tenant) -> str:
    if tenant.lost and tenant.node is None:
        return f"{tenant.id} to be heard again"
    if (tenant.lost or tenant.leaving) and _has_checkpoints_apart(state, tenant):
        return (
            f"{tenant.id}'s node {tenant.node} to be started again: no other node sees its runs folder,"
            " where its checkpoints are"
        )
    if tenant.lost:
        return f"{tenant.id} or its node {tenant.node} to be heard again, or room for it elsewhere"
    if tenant.leaving:
        return f"room for {tenant.id} elsewhere: its node {tenant.node} leaves"
    return f"{tenant.id} to {'start' if tenant.boot is None else 'get ready'}"


def _has_checkpoints_apart(state: State, tenant: Tenant) -> bool:
    """Others are up, and room on them would not help."""
    home = None if tenant.node is None else state.nodes.get(tenant.node)
    if home is None or tenant.role != "trainer":
        return False
    others = [node for node in state.nodes.values() if node is not home and node.open]
    return bool(others) and all(not node.runs_id or node.runs_id != home.runs_id for node in others)


def _work(pipeline: Pipeline) -> list[str]:
    causes = [
        f"{tenant.id} to load version {tenant.loading[1]}"
        for tenant in pipeline.usable("rollout")
        if tenant.loading is not None
    ]
    prompts = [
        ids.group_id(pipeline.name, g.number) for g in pipeline.groups.values() if g.prompt is None
    ]
    if prompts:
        causes.append(f"prompts of {_some(prompts)}")
    by_cause: dict[str, list[str]] = {}
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            cause = _sequence_wait(group, sequence)
            if cause is not None and not (pipeline.waits_for and sequence.stage == "waiting"):
                name = ids.sequence_id(pipeline.name, group.number, sequence.index)
                by_cause.setdefault(cause, []).append(name)
    return causes + [f"{cause} {_some(names)}" for cause, names in by_cause.items()]


def _has_more_to_place(pipeline: Pipeline) -> bool:
    stages = (s.stage for group in pipeline.groups.values() for s in group.sequences)
    return not pipeline.groups or "waiting" in stages


def _sequence_wait(group: Group, sequence: Sequence) -> str | None:
    if group.prompt is None or sequence.stage in ("scored", "failed"):
        return None
    if sequence.stage == "waiting":
        return "a rollout worker for" if sequence.target is None else f"{sequence.target} to take"
    if sequence.stage == "finished":
        return "a reward worker for"
    assert sequence.owner is not None
    if sequence.stage == "moving":
        return f"{sequence.owner.id} to hand over to {sequence.target or 'another'}"
    verb = {"placed": "accept", "running": "generate", "scoring": "score"}[sequence.stage]
    return f"{sequence.owner.id} to {verb}"


def _ending(pipeline: Pipeline) -> list[str]:
    running = [] if pipeline.evaluation is None else [pipeline.evaluation.version]
    causes = [f"evaluation of version {v}" for v in [*running, *pipeline.evaluations_due]]
    if (pipeline.checkpoint_version or 0) < pipeline.spec.num_steps:
        causes.append(f"checkpoint of version {pipeline.spec.num_steps}")
    return causes


def _trainer(pipeline: Pipeline) -> str:
    return "a trainer" if pipeline.trainer is None else pipeline.trainer.id


def _some(names: list[str]) -> str:
    more = len(names) - MAX_IDS
    return ", ".join(names[:MAX_IDS]) + (f" and {more} more" if more > 0 else "")
