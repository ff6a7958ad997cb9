"""Which devices this machine has: GPUs where ``nvidia-smi`` lists any, else one CPU slot per core."""

from __future__ import annotations

import os

import psutil

from jigsawrl.contract.spec import Device
from jigsawrl.devices.gpus import find_gpus


def discover(node: str, wanted: str | None = None) -> tuple[Device, ...]:
    """The devices to register; `wanted` names a choice such as ``cpu:0,cpu:1``, or ``cpu``: all slots.

    Raises ValueError for a device that this machine does not have."""
    cores = sorted(os.sched_getaffinity(0))
    memory_bytes = psutil.virtual_memory().total // len(cores)
    slots = {
        f"cpu:{core}": Device(node=node, index=core, kind="cpu", memory_bytes=memory_bytes)
        for core in cores
    }
    if wanted == "cpu":
        return tuple(slots.values())
    gpus = {
        f"cuda:{gpu.index}": Device(
            node=node, index=gpu.index, kind="cuda", memory_bytes=gpu.memory_bytes
        )
        for gpu in find_gpus(otherwise="choose --devices cpu")
    }
    if wanted is None:
        return tuple((gpus or slots).values())
    known = slots | gpus
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"--devices {name}: not on this machine; it has {', '.join(known)}")
    return tuple(known[name] for name in names)
