"""The GPUs of this machine as ``nvidia-smi`` lists them: torch, which knows them too, takes seconds to
import. The node registers them; the command asks for their name, by which profiles are found."""

from __future__ import annotations

import shutil
import subprocess

import msgspec

NVIDIA_SMI_TIMEOUT_S = 20.0
"""A driver that wakes up takes seconds."""


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One of them."""

    index: int
    memory_bytes: int
    name: str
    """Of the product."""


def find_gpus(*, otherwise: str, timeout_s: float = NVIDIA_SMI_TIMEOUT_S) -> tuple[Gpu, ...]:
    """None where there is no driver. Raises ValueError where it hangs: one line, which ends with what
    a person may do `otherwise`."""
    if shutil.which("nvidia-smi") is None:
        return ()
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,memory.total,name", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"nvidia-smi has not named the GPUs within {timeout_s:g} s: see why it hangs, or"
            f" {otherwise}"
        ) from None
    if answer.returncode != 0:
        return ()
    rows = (line.split(",", 2) for line in answer.stdout.splitlines() if line.strip())
    return tuple(
        Gpu(index=int(index), memory_bytes=int(mib) * 1024**2, name=name.strip())
        for index, mib, name in rows
    )
