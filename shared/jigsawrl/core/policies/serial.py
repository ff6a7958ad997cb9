"""`serial`: one pipeline at a time on all devices, in order of priority and submission.

Source: Verl's colocated alternation of rollout and training on the same devices (related systems
call it "hybrid engine"). Deviation: rollout and trainer stay resident as processes of their own
instead of swapping one process's memory, so each has the whole device in its phase by taking turns;
and so do the pipelines, so that the next begins at once when the one before has ended its work. What
comes before a pipeline's first version (its model, warm-up) waits for nobody.
Where batches overlap (depth above 1) there are no turns: rollout workers then live on other devices
than trainer ranks, as in AReaL, as long as there are enough.
"""

from __future__ import annotations

from jigsawrl.core.pipelines import has_begun
from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.terms import in_order


class Serial(Policy):
    """The first pipeline that has not ended its work has all devices."""

    name = "serial"

    def starts(self, state: State) -> list[Start]:
        """All that devices exist for."""
        return start_all(state, in_turns=True)

    def turn(self, state: State, pipeline: Pipeline) -> str | None:
        """After those before it."""
        return one_after_another(state, pipeline)


def one_after_another(state: State, pipeline: Pipeline) -> str | None:
    """The pipeline that comes first of those that still have work on devices, where that is another
    one: what has begun goes on, then the highest priority, then what was submitted first."""
    order = in_order(state.pipelines.values())
    for other in sorted(order, key=lambda other: not has_begun(other)):
        if other is pipeline:
            return None
        if other.paused:
            continue
        evaluating = other.evaluation is not None or other.evaluations_due
        if other.active and (other.stage != "finishing" or evaluating):
            return f"its turn: pipeline {other.name} comes first"
    return None
