"""Which prompts start, when, and for which step; and which samples have become too old.

Source: AReaL's staleness manager (`areal/infra/staleness_manager.py`): groups accepted or running
stay within (eta + v + 1) * B. Every step trains one batch of B slots, so that this is (eta + 1) * B
groups beyond version v. Deviations: the slot is reserved before anything is dispatched; groups, not
tasks, are counted, by id; instead of a limit on concurrent tasks, a depth in batches; and a hard bound
per sample (prime-rl's sweep at ship), since out-of-order completion may break AReaL's aggregate one
(areal-project/AReaL#602). `sync` is eta = 0, depth 1, bound 0: there is no branch on the mode.
"""

from __future__ import annotations

from jigsawrl.core import tally
from jigsawrl.core.filtering import trains_smaller
from jigsawrl.core.group import Group, Sequence
from jigsawrl.core.groups import end
from jigsawrl.core.state import Pipeline


def capacity(pipeline: Pipeline) -> int:
    """Groups that may be admitted now; may be negative after a rollback. A group that failed, was
    filtered or went stale is in no count: that is how it gives its slot back. Nor does a rollback
    start a burst: what was trained by the versions that stand is not admitted again."""
    if pipeline.version is None or pipeline.stage != "running":
        return 0
    spec = pipeline.spec
    if trains_smaller(pipeline):
        return 0
    num_steps_left = spec.num_steps - pipeline.version
    num_batches = min(spec.max_staleness + 1, spec.pipeline_depth, num_steps_left)
    num_cut = spec.groups_per_batch if pipeline.open_cut else 0
    return num_batches * spec.groups_per_batch - num_cut - len(pipeline.groups)


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
        group = pipeline.groups[number] = Group(
            number=number,
            cursor=cursor,
            data_floor=pipeline.data_sequence,
            sequences=[Sequence(index=i) for i in range(pipeline.spec.group_size)],
        )
        for sequence in group.sequences:
            tally.enter(pipeline, sequence)
        pipeline.to_make.append(number)


def oldest_versions(pipeline: Pipeline) -> dict[int, int]:
    """Per group in flight the oldest version that may make its tokens: eta below the version whose
    step will train it, as batches are cut in admission order. With eta = 0 that is exactly the
    version it is trained from."""
    assert pipeline.version is not None
    spec = pipeline.spec
    first = pipeline.version + (1 if pipeline.open_cut else 0) - spec.max_staleness
    return {
        number: max(pipeline.base_version, first + index // spec.groups_per_batch)
        for index, number in enumerate(pipeline.groups)
    }


def drop_stale(pipeline: Pipeline, groups: list[Group]) -> bool:
    """The hard bound on complete groups: one with a token that is too old is not trained. Whether
    there was one; then the next prompts take the slots."""
    assert pipeline.version is not None
    oldest = pipeline.version - pipeline.spec.sample_bound
    found = False
    for group in groups:
        versions = [s.min_version for s in group.sequences if s.stage == "scored"]
        if any(v is not None and v < oldest for v in versions):
            end(pipeline, group, "stale")
            found = True
    return found
