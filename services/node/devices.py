"""Which devices this machine has: GPUs where ``nvidia-smi`` lists any, else one CPU slot per core."""

from __future__ import annotations

import os
import shutil
import subprocess

import psutil

from jigsawrl.contract.spec import Device

NVIDIA_SMI_TIMEOUT_S = 20.0
"""A driver that wakes up takes seconds."""


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
    gpus = {f"cuda:{gpu.index}": gpu for gpu in _gpus(node)}
    if wanted is None:
        return tuple((gpus or slots).values())
    known = slots | gpus
    names = [name.strip() for name in wanted.split(",")]
    for name in names:
        if name not in known:
            raise ValueError(f"--devices {name}: not on this machine; it has {', '.join(known)}")
    return tuple(known[name] for name in names)


def _gpus(node: str) -> list[Device]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,memory.total", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"nvidia-smi has not named the GPUs within {NVIDIA_SMI_TIMEOUT_S:g} s: see why it hangs, or"
            " choose --devices cpu"
        ) from None
    if answer.returncode != 0:
        return []
    rows = (line.split(",") for line in answer.stdout.splitlines() if line.strip())
    return [
        Device(node=node, index=int(index), kind="cuda", memory_bytes=int(mib) * 1024**2)
        for index, mib in rows
    ]
