"""`serial`: one pipeline at a time on all devices, the others queued in order of submission.

Source: Verl's colocated alternation of rollout and training on the same devices (related systems
call it "hybrid engine"). Deviation: rollout and trainer stay resident as processes of their own
instead of swapping one process's memory, so each has the whole device in its phase by taking turns.
Where batches overlap (depth above 1) there are no turns: rollout workers then live on other devices
than trainer ranks, as in AReaL, as long as there are enough.
"""

from __future__ import annotations

from jigsawrl.contract.message import Role
from jigsawrl.contract.spec import Device
from jigsawrl.core.policies.base import Place, Start
from jigsawrl.core.state import Pipeline, State


class Serial:
    """Starts the oldest queued pipeline when none is active."""

    name = "serial"

    def starts(self, state: State) -> list[Start]:
        """At most one."""
        if any(pipeline.active for pipeline in state.pipelines.values()):
            return []
        queued = (p for p in state.pipelines.values() if p.stage == "queued")
        pipeline = next(queued, None)
        if pipeline is None:
            return []
        places = place(pipeline, devices_for(pipeline, state))
        return [] if places is None else [Start(pipeline=pipeline.name, places=places)]


def devices_for(pipeline: Pipeline, state: State) -> list[Device]:
    """Devices of nodes that are up, of the kind asked for; GPUs, where there are any, for `auto`."""
    devices = [d for node in state.nodes.values() if node.up for d in node.devices]
    kind = pipeline.spec.device
    if kind == "auto":
        kind = "cuda" if any(d.kind == "cuda" for d in devices) else "cpu"
    return sorted(device for device in devices if device.kind == kind)


def place(pipeline: Pipeline, devices: list[Device]) -> tuple[Place, ...] | None:
    """Trainer ranks round robin over the machine of the first device (they meet through files and the
    loopback interface), evaluation on the last device, rollout workers round robin over all, or over
    those without a trainer rank where generation and training overlap; environment and reward need
    none. Members started by hand stand in for tenants of their role. None where a tenant is needed
    and no device is there."""
    members: dict[Role, int] = {}
    for tenant in pipeline.tenants.values():
        members[tenant.role] = members.get(tenant.role, 0) + 1
    wanted: list[tuple[Role, int]] = [("environment", 1), ("reward", 1)]
    wanted.append(("trainer", pipeline.spec.num_trainer_ranks))
    if pipeline.spec.evaluation is not None:
        wanted.append(("evaluation", 1))
    wanted.append(("rollout", pipeline.spec.num_rollout_workers))
    places = []
    for role, count in wanted:
        for index in range(count - members.get(role, 0)):
            if not devices:
                return None
            device = _device(pipeline, role, index, devices)
            places.append(
                Place(
                    tenant=f"{pipeline.name}.{role}{index}",
                    role=role,
                    node=device.node,
                    device=None if role in ("environment", "reward") else device.id,
                )
            )
    return tuple(places)


def _device(pipeline: Pipeline, role: Role, index: int, devices: list[Device]) -> Device:
    if role == "evaluation":
        return devices[-1]
    near = [device for device in devices if device.node == devices[0].node]
    if role == "trainer":
        return near[index % len(near)]
    trained_on = near[: pipeline.spec.num_trainer_ranks]
    if pipeline.spec.pipeline_depth > 1 and len(trained_on) < len(devices):
        devices = [device for device in devices if device not in trained_on]
    return devices[index % len(devices)]
