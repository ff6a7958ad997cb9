"""Dynamic sampling: groups whose rewards are all equal are filtered, and other prompts take their
slots, so that a batch holds only groups that teach something.

Source: DAPO (arXiv:2503.14476, section 3.2); verl's ``filter_groups``. Deviations: a group is filtered
when it completes, so that its slot is refilled at once; equality is exact; and what happens when
prompts keep failing the filter is always stated (verl#953 aborts a run, OpenRLHF#1310 throws accepted
groups away).

The rewards that decide are those of the reward service, as DAPO filters on accuracy. Where the baseline
is the group's mean and nothing shapes rewards, advantages of what is filtered are exactly 0 (before
whitening, where there is any); `algorithm.overlong` may have told apart answers of one reward by their
lengths. Where the baseline is the batch's or a critic's the config refuses dynamic sampling.
"""

from __future__ import annotations

from jigsawrl.core import pipelines
from jigsawrl.core.group import Group
from jigsawrl.core.groups import end
from jigsawrl.core.state import Pipeline, State


def exhausted(pipeline: Pipeline) -> bool:
    """Whether the next step has used up its filtered groups."""
    sampling = pipeline.spec.dynamic_sampling
    if sampling is None:
        return False
    return pipeline.num_filtered >= sampling.max_batches * pipeline.spec.groups_per_batch


def trains_smaller(pipeline: Pipeline) -> bool:
    """The next step takes the groups that there are: none is admitted until it is cut."""
    sampling = pipeline.spec.dynamic_sampling
    return (
        sampling is not None and sampling.when_exhausted == "train_smaller" and exhausted(pipeline)
    )


def filter_uniform(state: State, pipeline: Pipeline) -> None:
    """Filter complete groups with equal rewards, up to the limit; then the rule applies."""
    sampling = pipeline.spec.dynamic_sampling
    if sampling is None or pipeline.stage != "running":
        return
    for group in list(pipeline.groups.values()):
        if not (group.complete and _uniform(group)):
            continue
        if not exhausted(pipeline) or sampling.when_exhausted == "train_smaller":
            end(pipeline, group, "filtered")
            pipeline.num_filtered += 1
        elif sampling.when_exhausted == "fail":
            reason = (
                f"step {pipeline.version}: {pipeline.num_filtered} groups in a row had equal rewards"
                " (trainer.dynamic_sampling.max_batches): the task is too easy or too hard for the"
                " model"
            )
            pipelines.fail(state, pipeline, reason)
            return
    if trains_smaller(pipeline) and not pipeline.groups and pipeline.open_cut is None:
        reason = f"step {pipeline.version}: no group of {pipeline.num_filtered} has unequal rewards"
        pipelines.fail(state, pipeline, reason)


def _uniform(group: Group) -> bool:
    scores = [s.score for s in group.sequences if s.stage == "scored"]
    return len(set(scores)) == 1
