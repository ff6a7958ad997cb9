"""`serial`: one pipeline at a time on all devices, the others queued in order of submission.

Source: Verl's colocated alternation of rollout and training on the same devices (related systems
call it "hybrid engine"). Deviation: rollout and trainer stay resident as processes of their own
instead of swapping one process's memory, so each has the whole device in its phase by taking turns.
Where batches overlap (depth above 1) there are no turns: rollout workers then live on other devices
than trainer ranks, as in AReaL, as long as there are enough.
"""

from __future__ import annotations

from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.placement import Occupancy, devices_for, place
from jigsawrl.core.state import State


class Serial(Policy):
    """Starts the oldest queued pipeline when none is active."""

    name = "serial"

    def starts(self, state: State) -> list[Start]:
        """At most one."""
        return next_alone(state, apart=False)


def next_alone(state: State, *, apart: bool) -> list[Start]:
    """The oldest queued pipeline, where none is active; `apart` keeps generation off the devices of
    training even where they take turns."""
    if any(pipeline.active for pipeline in state.pipelines.values()):
        return []
    pipeline = next((p for p in state.pipelines.values() if p.stage == "queued"), None)
    if pipeline is None:
        return []
    apart = apart or pipeline.spec.pipeline_depth > 1
    places = place(pipeline, devices_for(pipeline, state), Occupancy([pipeline]), apart=apart)
    return [] if places is None else [Start(pipeline=pipeline.name, places=places)]
