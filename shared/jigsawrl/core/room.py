"""Whether a queued pipeline can ever live on the cluster's devices, and what it waits for if so.

The scheduler fails what fits nowhere, `status` tells what waits. Machines that are down count as
devices that may come back; before any has been heard of, and while others may be about to join,
everything waits.
"""

from __future__ import annotations

from jigsawrl.contract.message import Role
from jigsawrl.contract.spec import Device
from jigsawrl.core.policies.placement import ON_DEVICES, Occupancy, devices_for, of_kind, place
from jigsawrl.core.state import Pipeline, State
from jigsawrl.core.terms import in_order

_REMEDIES: dict[Role, str] = {
    "trainer": "lower trainer.max_microbatch_tokens or raise trainer.num_ranks",
    "rollout": "lower rollout.engine.max_running or rollout.sampling.max_new_tokens",
    "evaluation": "lower evaluation.max_running",
}


def never_fits(state: State, pipeline: Pipeline) -> str | None:
    """Why not even the idle cluster, with all machines that joined, could hold it; one line that says
    what to change."""
    if state.joined_s is not None:
        return None
    devices = of_kind(pipeline, [d for node in state.nodes.values() for d in node.devices])
    if not devices or place(pipeline, devices, Occupancy([]), apart=False) is not None:
        return None
    largest = max(devices, key=lambda device: (device.memory_bytes, device.id))
    for role, num_bytes in _needs(pipeline):
        if num_bytes > largest.memory_bytes:
            return (
                f"pipeline {pipeline.name} fits on no device: its {role} needs {_mib(num_bytes)}, and"
                f" the largest, {largest.id}, has {_mib(largest.memory_bytes)}: {_REMEDIES[role]}, or"
                f" set scheduling.memory.{role}_bytes where the estimate is too high"
            )
    each = ", ".join(f"{role} {_mib(num_bytes)}" for role, num_bytes in _needs(pipeline))
    total = sum(device.memory_bytes for device in devices)
    return (
        f"pipeline {pipeline.name} does not fit: its tenants need {each}, and the {len(devices)}"
        f" devices have {_mib(total)} together, {largest.id} {_mib(largest.memory_bytes)}: have fewer"
        " rollout.num_workers or trainer.num_ranks, or make them smaller (docs/config.md)"
    )


def waits_for(state: State, pipeline: Pipeline) -> list[str]:
    """What keeps a queued pipeline from starting, one entry a cause."""
    devices = devices_for(pipeline, state)
    if not devices:
        return [f"a node with a device of kind {pipeline.spec.device}"]
    others = [p for p in state.pipelines.values() if p.active]
    occupancy = Occupancy(others)
    causes = []
    if place(pipeline, devices, occupancy, apart=False) is None:
        causes.append(_short(pipeline, devices, occupancy))
    first = in_order(p for p in state.pipelines.values() if p.stage == "queued")[0]
    if first is not pipeline:
        causes.append(f"pipeline {first.name}, which is ahead of it, to start")
    return causes + [f"pipeline {one.name} to end" for one in others]


def _short(pipeline: Pipeline, devices: list[Device], occupancy: Occupancy) -> str:
    """The role that asks for most is what fails to find room first."""
    role, num_bytes = max(_needs(pipeline), key=lambda need: need[1])
    freest = max(devices, key=lambda device: (occupancy.free_bytes(device), device.id))
    return (
        f"memory: its {role} needs {_mib(num_bytes)} beside its other tenants, and {freest.id}, the"
        f" freest device, has {_mib(occupancy.free_bytes(freest))} of {_mib(freest.memory_bytes)} left"
    )


def _needs(pipeline: Pipeline) -> list[tuple[Role, int]]:
    """Of each role that it has."""
    roles = [r for r in ON_DEVICES if r != "evaluation" or pipeline.spec.evaluation is not None]
    return [(role, pipeline.spec.memory.of(role)) for role in roles]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
