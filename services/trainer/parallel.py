"""FSDP2 over the ranks of a trainer gang, one rank included: the same code for any number.

The learner calls it, in its thread. Ranks of one machine meet through a file, and gloo listens on the
loopback interface only."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from jigsawrl.models.loading import DTYPES
from services.trainer.thread import StoppedError

COLLECTIVE_TIMEOUT_S = 300.0
"""For a rank that is frozen. One that ended is noticed at once, and its node kills the others; what
ranks do between two collectives is a read of the batch or a write of weights or a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Gang:
    """The ranks that train together, seen from one of them."""

    rank: int
    num_ranks: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks of a small tensor of float64."""
        if self.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        """The maximum over ranks."""
        if self.num_ranks > 1:
            dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return values

    def check_stop(self, check_own: Callable[[], None]) -> None:
        """Raise `StoppedError` where `check_own` raises it on any rank; a collective, since a rank that
        went on alone would wait in its next one for those that stopped."""
        if self.num_ranks == 1:
            check_own()
            return
        try:
            check_own()
            stopped = 0.0
        except StoppedError:
            stopped = 1.0
        if float(self.max(torch.tensor(stopped, dtype=torch.float64, device=self.device))):
            raise StoppedError


def join_gang(
    device: torch.device,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    meeting: Path | None = None,
) -> Gang:
    """Start the process group. `meeting` is a file that all ranks name and that no other gang has used;
    a gang of one needs none."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    assert meeting is not None or num_ranks == 1
    store = HashStore() if meeting is None else FileStore(str(meeting), num_ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    mesh = init_device_mesh(device.type, (num_ranks,))
    return Gang(rank=rank, num_ranks=num_ranks, device=device, mesh=mesh)


def leave_gang() -> None:
    """End the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def shard(model: Any, gang: Gang, *, dtype: Literal["float32", "bfloat16"]) -> Any:
    """Shard a decoder model in place, layer by layer; parameters stay float32, the arithmetic is in
    `dtype`, gradients are reduced in float32."""
    policy = (
        MixedPrecisionPolicy()
        if dtype == "float32"
        else MixedPrecisionPolicy(param_dtype=DTYPES[dtype], reduce_dtype=torch.float32)
    )
    # One rank holds everything anyway: freeing after the forward pass would only copy.
    keep = gang.num_ranks == 1
    for layer in model.model.layers:
        fully_shard(layer, mesh=gang.mesh, mp_policy=policy, reshard_after_forward=not keep)
    fully_shard(model, mesh=gang.mesh, mp_policy=policy, reshard_after_forward=not keep)
    return model


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on the CPU; a collective where it is sharded."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu()


def placed_like(whole: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded and placed as `parameter` is."""
    if isinstance(parameter, DTensor):
        moved = whole.to(parameter.device)
        return distribute_tensor(moved, parameter.device_mesh, parameter.placements)
    return whole.to(parameter.device)


def full_state(model: Any) -> dict[str, Tensor]:
    """All parameters by name, whole; tied ones once, under their first name."""
    return {name: full(parameter).clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def load_full_state(model: Any, state: dict[str, Tensor]) -> None:
    """Fill a model, sharded or not; raises ValueError where names or shapes differ."""
    parameters = dict(model.named_parameters())
    if parameters.keys() != state.keys():
        odd = sorted(parameters.keys() ^ state.keys())[:3]
        raise ValueError(f"weights and model differ in {', '.join(odd)}")
    for name, parameter in parameters.items():
        if parameter.shape != state[name].shape:
            raise ValueError(
                f"{name} has shape {list(state[name].shape)}, not {list(parameter.shape)}"
            )
        parameter.copy_(placed_like(state[name], parameter))


def optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, whole, as ``<key>/<parameter name>``."""
    return {
        f"{key}/{name}": full(value).clone()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]
) -> None:
    """Fill an optimizer of `model` with what `optimizer_tensors` gave."""
    parameters = dict(model.named_parameters())
    for entry, value in tensors.items():
        key, name = entry.split("/", 1)
        # AdamW keeps its step counts on the CPU and unsharded.
        placed = value if key == "step" else placed_like(value, parameters[name])
        optimizer.state[parameters[name]][key] = placed
