"""Which torch device a tenant computes on."""

from __future__ import annotations

import torch


def choose_device(configured: str, assigned: str | None) -> torch.device:
    """The device that the node assigned (``node/cuda0``; the node hides all other GPUs), or for a
    tenant started by hand the `configured` one (``auto``, ``cpu`` or ``cuda``).

    Raises ValueError where there is no such device."""
    if configured == "cpu":
        return torch.device("cpu")
    wanted = configured if assigned is None else assigned.rsplit("/", 1)[-1]
    if torch.cuda.is_available() and not wanted.startswith("cpu"):
        return torch.device("cuda", 0)
    if wanted.startswith("cuda") or configured == "cuda":
        raise ValueError(
            f"device {wanted}: torch sees no CUDA device here; set device to cpu, or start the node"
            " on a machine with a GPU"
        )
    return torch.device("cpu")
