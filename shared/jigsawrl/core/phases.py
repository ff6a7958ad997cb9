"""Where each tenant of a pipeline is in its step, as the scheduler can tell from what it dispatched.

Feeds the look-ahead: which predicted sub-stages are over, what runs beside what. It trusts its own
books (what is placed, cut, trained), since sub-stage events come up to half a second late.
"""

from __future__ import annotations

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.gathering import GENERATION
from jigsawrl.core.state import Pipeline, Tenant

BEFORE_CUT: frozenset[SubStageKind] = frozenset({*GENERATION, "reward_wait"})


def kind_of(pipeline: Pipeline, tenant: Tenant) -> SubStageKind | None:
    """What one tenant does now; None where it is idle."""
    if tenant.role == "rollout":
        count = pipeline.num_generating.get(tenant.id, 0)
        if not count:
            return None
        return "tail_decode" if count <= pipeline.tail_sequences else "bulk_decode"
    if tenant.role == "trainer":
        return None if pipeline.open_cut is None else "forward_backward"
    worker = None if pipeline.evaluation is None else pipeline.evaluation.sent_to
    return "evaluation" if worker is not None and worker.id == tenant.id else None


def step_of(pipeline: Pipeline, *, version: int, kind: SubStageKind) -> int:
    """The step that reported work is for. Where batches overlap, what comes before the cut is told with
    the version of the weights that generate, while it is for the step behind the one in training."""
    if pipeline.version is None:
        return version
    if kind in BEFORE_CUT and pipeline.spec.max_staleness:
        return max(version, pipeline.version + (1 if pipeline.open_cut else 0))
    # Which wait for rewards was a step's last is known, and told, in the next one.
    return max(version, pipeline.version) if kind == "reward_wait" else version


class Ended:
    """Sub-stages of the step under way that are over."""

    def __init__(self, pipeline: Pipeline) -> None:
        """As of now."""
        self._version = pipeline.version
        self._is_cut = pipeline.open_cut is not None
        overlaps = pipeline.spec.max_staleness > 0
        self._placed = not overlaps and bool(pipeline.groups) and not pipeline.num_waiting
        self._counts = pipeline.num_generating
        self._tail = pipeline.tail_sequences

    def __contains__(self, id: object) -> bool:
        assert isinstance(id, tuple)
        version, tenant, kind = id
        if version != self._version or kind not in BEFORE_CUT:
            return False
        if self._is_cut:
            return True
        if not self._placed or kind == "reward_wait":
            return False
        count = self._counts.get(tenant, 0)
        return kind == "prefill" or count <= (self._tail if kind == "bulk_decode" else 0)
