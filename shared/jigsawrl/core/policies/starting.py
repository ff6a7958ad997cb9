"""Starts queued pipelines, as far as there is room for their tenants."""

from __future__ import annotations

from jigsawrl.core.policies.base import Start
from jigsawrl.core.policies.placement import Occupancy, devices_for, place
from jigsawrl.core.state import State
from jigsawrl.core.terms import in_order


def start_all(state: State, *, in_turns: bool = False, apart: bool = False) -> list[Start]:
    """Every queued pipeline for which there are devices with room, spread over them. Who finds no room
    is not overtaken: others would take again and again what becomes free.

    `in_turns`: they never work at the same time, so that each is placed as if it were alone; `apart`
    keeps generation off the devices of training even where they take turns."""
    queued = in_order(p for p in state.pipelines.values() if p.stage == "queued")
    if not queued:
        return []
    occupancy = Occupancy(p for p in state.pipelines.values() if p.live)
    starts = []
    waited_for: set[str] = set()
    for pipeline in queued:
        devices = devices_for(pipeline, state)
        kinds = {device.kind for device in devices}
        if kinds & waited_for:
            continue
        places = place(
            pipeline,
            devices,
            occupancy.alone(pipeline) if in_turns else occupancy,
            apart=apart or pipeline.spec.pipeline_depth > 1,
        )
        if places is not None:
            starts.append(Start(pipeline=pipeline.name, places=places))
        waited_for |= kinds if places is None else set()
    return starts
