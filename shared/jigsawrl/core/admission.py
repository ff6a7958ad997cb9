"""Which prompts start, and when.

Source: AReaL's staleness manager (`areal/infra/staleness_manager.py`): groups accepted or running
stay within (eta + v + 1) * B. `sync` is eta = 0. Deviations: the slot is reserved before anything is
dispatched; groups, not tasks, are counted, by id; there is no separate limit on concurrency, since
a batch's groups are all that can run when eta is 0.
"""

from __future__ import annotations

from jigsawrl.core.groups import end
from jigsawrl.core.state import Group, Pipeline, Sequence

ETA = {"sync": 0}
"""Versions that a batch's tokens may lag behind, by mode."""


def capacity(pipeline: Pipeline) -> int:
    """Groups that may be admitted now; may be negative after a rollback. A group that failed, or
    went stale, is in neither count: that is how it gives its slot back."""
    if pipeline.version is None or pipeline.stage != "running":
        return 0
    limit = (ETA[pipeline.spec.mode] + pipeline.version + 1) * pipeline.spec.groups_per_batch
    before = pipeline.base_version * pipeline.spec.groups_per_batch
    cut = pipeline.open_cut
    in_flight = len(pipeline.groups) + (len(cut.groups) if cut else 0)
    return limit - before - len(pipeline.group_fates["trained"]) - in_flight


def admit(pipeline: Pipeline) -> None:
    """Admit as many groups as the rule allows."""
    for _ in range(capacity(pipeline)):
        if pipeline.returned_cursors:
            cursor = pipeline.returned_cursors.pop(0)
        else:
            cursor = pipeline.next_cursor
            pipeline.next_cursor += 1
        number = pipeline.num_admitted
        pipeline.num_admitted += 1
        pipeline.groups[number] = Group(
            number=number,
            cursor=cursor,
            data_floor=pipeline.data_sequence,
            sequences=[Sequence(index=i) for i in range(pipeline.spec.group_size)],
        )
        pipeline.to_make.append(number)


def drop_stale(pipeline: Pipeline, groups: list[Group]) -> bool:
    """The hard bound on complete groups: one with a token older than the mode allows is not trained.
    Whether there was one; then the next prompts take the slots."""
    assert pipeline.version is not None
    oldest = pipeline.version - ETA[pipeline.spec.mode]
    found = False
    for group in groups:
        versions = [s.min_version for s in group.sequences if s.stage == "scored"]
        if any(v is not None and v < oldest for v in versions):
            end(pipeline, group, "stale")
            found = True
    return found
