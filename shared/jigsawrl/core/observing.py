"""Sub-stage events into the history that predictions are made from."""

from __future__ import annotations

from jigsawrl.contract.events import SubStagesEnded
from jigsawrl.contract.parts import SubStage
from jigsawrl.core import phases, profiles
from jigsawrl.core.slowdown import Running
from jigsawrl.core.state import Pipeline, State, Tenant
from jigsawrl.core.work_history import Observation, close, observe, reopen

LATE_STEPS = 1
"""A step is averaged when so many later versions are there. Rollout workers and trainers tell their
last spans before what ends their part of a step; what comes later all the same is left out."""

FIRST_JUDGED = 3
"""Steps before predictions are judged: the first ones fill caches and allocate."""

MAX_ERRORS = 256

MAX_VERSIONS = 64
"""Whose times are kept: more steps than the decisions that are kept look at."""


def reported(state: State, pipeline: Pipeline, tenant: Tenant, event: SubStagesEnded) -> None:
    """Spans of a living boot, brought to full speed by the share it had beside its neighbour. Of steps
    that are averaged already, or can't have begun, nothing is believed."""
    share, beside = _division(state, tenant)
    newest = pipeline.base_version if pipeline.version is None else pipeline.version
    possible = range(newest - LATE_STEPS + 1, newest + pipeline.spec.pipeline_depth + 1)
    for span in event.spans:
        step = phases.step_of(pipeline, version=span.version, kind=span.kind)
        if step not in possible or _is_start(pipeline, span):
            continue
        # Where the time on a core is known, no share needs to be believed.
        measured = span.cpu_s is not None
        observation = Observation(
            pipeline=pipeline.name,
            version=step,
            tenant=tenant.id,
            device=tenant.device,
            kind=span.kind,
            duration_s=span.duration_s if span.cpu_s is None else span.cpu_s,
            num_iterations=span.num_iterations,
            num_tokens=span.num_tokens,
            share=1.0 if measured else share,
            beside=None if measured else beside,
        )
        observe(pipeline.work, observation, table=profiles.table(state))


def _is_start(pipeline: Pipeline, span: SubStage) -> bool:
    """The first weights: loading them builds the model, and later ones take a fraction of that."""
    return span.kind == "weight_sync" and span.version <= pipeline.base_version


def step_ended(pipeline: Pipeline, *, version: int, now_s: float) -> None:
    """`version` is published."""
    pipeline.version_s[version] = now_s
    for old in sorted(pipeline.version_s)[:-MAX_VERSIONS]:
        del pipeline.version_s[old]
    if version <= pipeline.base_version:
        return  # no step has ended: these weights are what the pipeline began with
    known = pipeline.work.num_steps >= FIRST_JUDGED
    compared = close(pipeline.work, version=version - LATE_STEPS)
    if known:
        pipeline.errors += [(one.predicted_s, one.observed_s) for one in compared]
    del pipeline.errors[:-MAX_ERRORS]


def rolled_back(pipeline: Pipeline, *, version: int) -> None:
    """To this version."""
    pipeline.version_s = {v: s for v, s in pipeline.version_s.items() if v <= version}
    reopen(pipeline.work, version=version)


def _division(state: State, tenant: Tenant) -> tuple[float, Running | None]:
    """The tenant's part of its device among those that work, and the strongest of the others. Shares
    are weights of a work-conserving division: who is alone has all of it."""
    others: list[tuple[float, Running]] = []
    for name in state.residents.get(tenant.device or "", ()):
        if name == tenant.id:
            continue
        pipeline = state.pipelines[name.partition(".")[0]]
        other = pipeline.tenants[name]
        kind = phases.kind_of(pipeline, other)
        if kind is not None:
            weight = other.applied_share or 0.0
            others.append((weight, (kind, weight)))
    own = tenant.applied_share or 0.0
    total = own + sum(weight for weight, _ in others)
    if not others or total <= 0:
        return 1.0, None
    weight, (beside, _) = max(others, key=lambda other: other[0])
    return own / total, (beside, weight / total)
