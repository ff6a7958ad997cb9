"""What a worker does at this moment, and why, in a few words. Called by `why`; pure."""

from __future__ import annotations

from collections.abc import Iterable

from jigsawrl.core import phases
from jigsawrl.core.group import GENERATING, Sequence
from jigsawrl.core.policies import POLICIES
from jigsawrl.core.policies.jigsaw import Jigsaw
from jigsawrl.core.policies.rlix import Rlix
from jigsawrl.core.state import Pipeline, State, Tenant


def doing(state: State, pipeline: Pipeline, tenant: Tenant) -> tuple[str, str]:
    """The kind of work, or ``idle``; and the reason."""
    if not pipeline.active:
        return "idle", f"its pipeline is {pipeline.stage}"
    if tenant.boot is None:
        return "idle", "its process is not up"
    if tenant.lost:
        return "idle", "nothing was heard of it for too long: its work went to others"
    if not tenant.ready:
        return "idle", "it sets itself up"
    kind = phases.kind_of(pipeline, tenant)
    if tenant.role in ("environment", "reward"):
        return _service(pipeline, tenant)
    if kind is None:
        return "idle", _waits(pipeline, tenant)
    return kind, "; ".join(
        part for part in (_work(pipeline, tenant), _share(state, tenant)) if part
    )


def _sequences(pipeline: Pipeline) -> Iterable[Sequence]:
    return (sequence for group in pipeline.groups.values() for sequence in group.sequences)


def _service(pipeline: Pipeline, tenant: Tenant) -> tuple[str, str]:
    if tenant.role == "environment":
        num = sum(group.owner == tenant.worker for group in pipeline.groups.values())
        what = "makes prompts"
    else:
        num = sum(sequence.owner == tenant.worker for sequence in _sequences(pipeline))
        what = "scores"
    return (what, f"{num} were ordered") if num else ("idle", "nothing is ordered")


def _waits(pipeline: Pipeline, tenant: Tenant) -> str:
    """Why there is nothing to do."""
    if tenant.role == "evaluation":
        return "no version is to be evaluated"
    if pipeline.version is None:
        return "there are no weights yet"
    if tenant.role == "trainer":
        if pipeline.version >= pipeline.spec.num_steps:
            return "all steps are trained"
        stages = [sequence.stage for sequence in _sequences(pipeline)]
        num = sum(stage == "waiting" or stage in GENERATING for stage in stages)
        scores = sum(stage in ("finished", "scoring") for stage in stages)
        version = pipeline.version + 1
        return f"the batch for version {version} lacks {num} sequences and {scores} scores"
    if tenant.loading is not None:
        return f"it loads version {tenant.loading[1]}"
    if any(sequence.stage == "waiting" for sequence in _sequences(pipeline)):
        return "sequences wait for their prompts, or for weights elsewhere"
    if pipeline.open_cut is not None:
        return f"version {pipeline.open_cut.version + 1} is being trained"
    return "its part of the step is generated"


def _work(pipeline: Pipeline, tenant: Tenant) -> str:
    """What exactly is done."""
    if tenant.role == "rollout":
        num = pipeline.num_generating.get(tenant.id, 0)
        return f"{num} sequences of version {tenant.version}"
    if tenant.role == "trainer" and pipeline.open_cut is not None:
        return f"step to version {pipeline.open_cut.version + 1}"
    return ""


def _share(state: State, tenant: Tenant) -> str:
    """Where its share comes from."""
    if tenant.device is None or tenant.share is None:
        return "no share is set"
    if state.policy == Rlix.name:
        return _turn(state, tenant)
    memory = state.outlooks
    multiplexes = isinstance(POLICIES.get(state.policy), Jigsaw)
    if not multiplexes or tenant.device not in memory.wanted:
        return "equal shares" + (": nothing is predicted" if multiplexes else "")
    target = next((m[tenant.id] for m in memory.merges.values() if tenant.id in m), None)
    if target is not None:
        return f"its tail moves to {target}"
    held_s = [s for node, s in memory.held_since_s.items() if f"/{tenant.id}/" in node]
    if held_s:
        return f"held for {state.clock.now_s - min(held_s):.1f} s, so that others end sooner"
    for decision in reversed(memory.decisions):
        if any(f"/{tenant.id}/" in node for node in decision.shares):
            return f"share by the decision of {decision.now_s:.1f} s"
    return "share by a decision on its device"


def _turn(state: State, tenant: Tenant) -> str:
    """Of a policy under which a device has one user."""
    name = tenant.id.partition(".")[0]
    request = state.pool.requests.get(name)
    granted = request is not None and request.granted
    if tenant.id in state.pool.active.get(name, ()) or (tenant.role == "trainer" and granted):
        return "it has the device"
    return "it has what others leave of the device"
