"""Where each tenant of a pipeline is in its step, as the scheduler can tell from what it dispatched.

Feeds the look-ahead: which predicted sub-stages are over, what runs beside what. It trusts its own
books (what is placed, cut, trained), since sub-stage events come up to half a second late.
"""

from __future__ import annotations

from jigsawrl.contract.message import SubStageKind
from jigsawrl.core.prediction import SubStageId
from jigsawrl.core.state import GENERATING, Pipeline

BEFORE_CUT: tuple[SubStageKind, ...] = (
    "prefill",
    "bulk_decode",
    "tool_wait",
    "tail_decode",
    "reward_wait",
)


def num_generating(pipeline: Pipeline) -> dict[str, int]:
    """Sequences that each rollout worker has to generate now."""
    counts = {t.id: 0 for t in pipeline.tenants.values() if t.role == "rollout"}
    for group in pipeline.groups.values():
        for sequence in group.sequences:
            if sequence.stage in GENERATING and sequence.owner is not None:
                counts[sequence.owner.id] = counts.get(sequence.owner.id, 0) + 1
    return counts


def all_placed(pipeline: Pipeline) -> bool:
    """Nothing that is admitted still waits to be made or placed."""
    return all(
        group.prompt is not None and all(s.stage != "waiting" for s in group.sequences)
        for group in pipeline.groups.values()
    )


def current_kinds(pipeline: Pipeline) -> dict[str, SubStageKind]:
    """What each busy tenant does now; idle ones are absent."""
    kinds: dict[str, SubStageKind] = {}
    for name, count in num_generating(pipeline).items():
        if count:
            kinds[name] = "tail_decode" if count <= pipeline.tail_sequences else "bulk_decode"
    if pipeline.open_cut is not None:
        kinds |= {rank.id: "forward_backward" for rank in pipeline.gang}
    if pipeline.evaluation is not None and pipeline.evaluation.sent_to is not None:
        kinds[pipeline.evaluation.sent_to.id] = "evaluation"
    return kinds


def step_of(pipeline: Pipeline, *, version: int, kind: SubStageKind) -> int:
    """The step that reported work is for. Where batches overlap, what comes before the cut is told with
    the version of the weights that generate, while it is for the step behind the one in training."""
    if kind in BEFORE_CUT and pipeline.spec.max_staleness and pipeline.version is not None:
        return max(version, pipeline.version + (1 if pipeline.open_cut else 0))
    return version


def ended(pipeline: Pipeline) -> frozenset[SubStageId]:
    """Sub-stages of the step under way that are over."""
    version = pipeline.version
    if version is None:
        return frozenset()
    over: set[SubStageId] = set()
    counts = num_generating(pipeline)
    if pipeline.open_cut is not None:
        return frozenset((version, name, kind) for name in counts for kind in BEFORE_CUT)
    if pipeline.spec.max_staleness or not pipeline.groups or not all_placed(pipeline):
        return frozenset()
    for name, count in counts.items():
        over.add((version, name, "prefill"))
        if count <= pipeline.tail_sequences:
            over.add((version, name, "bulk_decode"))
        if not count:
            over |= {(version, name, kind) for kind in ("tool_wait", "tail_decode")}
    return frozenset(over)
