"""`unmanaged`: all pipelines at once, with equal weights, no holds and no migration: what the operating
system gives for free.

Source: ours, as a baseline for `jigsaw`. Trainers and rollout workers of different pipelines are spread
over the devices, so that none is idle while another has two of a kind.
"""

from __future__ import annotations

from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.placement import Occupancy, devices_for, place
from jigsawrl.core.state import State
from jigsawrl.core.terms import in_order


class Unmanaged(Policy):
    """Starts every queued pipeline at once."""

    name = "unmanaged"

    def starts(self, state: State) -> list[Start]:
        """All that devices exist for."""
        return start_all(state)


class Unpinned(Unmanaged):
    """The same with tenants that may run on any core, as processes do that nobody places."""

    name = "unmanaged-unpinned"
    pins = False


def start_all(state: State) -> list[Start]:
    """Every queued pipeline for which there are devices, spread over them."""
    occupancy = Occupancy(p for p in state.pipelines.values() if p.live)
    starts = []
    for pipeline in in_order(state.pipelines.values()):
        if pipeline.stage == "queued":
            apart = pipeline.spec.pipeline_depth > 1
            devices = devices_for(pipeline, state)
            places = place(pipeline, devices, occupancy, apart=apart)
            if places is not None:
                starts.append(Start(pipeline=pipeline.name, places=places))
    return starts
