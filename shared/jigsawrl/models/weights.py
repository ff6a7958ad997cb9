"""State dicts to and from the bytes of the weight channel.

The payload is all tensors end to end in the order of their names; the manifest says where each lies.
A tensor under several names (tied embeddings) is written once per name that the state dict lists, so
trainers leave tied copies out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from jigsawrl.contract.message import DType, message_id
from jigsawrl.contract.records import WeightManifest, WeightTensor
from jigsawrl.contract.streams import MAX_WEIGHT_BYTES

CHUNK_BYTES = 1024 * 1024
"""One message of the weight channel; 1 MB measured fastest over JetStream."""

_DTYPES: dict[torch.dtype, DType] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}
_TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}


def pack(
    state: Mapping[str, torch.Tensor],
    *,
    pipeline: str,
    incarnation: int,
    version: int,
    model_config: str,
) -> tuple[WeightManifest, memoryview]:
    """The manifest and payload of a state dict of CPU tensors.

    Raises ValueError where the payload exceeds what the channel carries."""
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    if num_bytes > MAX_WEIGHT_BYTES:
        raise ValueError(
            f"weights of {num_bytes} bytes exceed the {MAX_WEIGHT_BYTES} that the weight channel"
            " carries; larger models need weights over shared disk or a process group"
        )
    payload = bytearray(num_bytes)
    view = memoryview(payload)
    tensors: list[WeightTensor] = []
    offset = 0
    for name in sorted(state):
        raw = state[name].detach().contiguous().cpu().reshape(-1).view(torch.uint8)
        view[offset : offset + raw.numel()] = raw.numpy().tobytes()
        tensors.append(
            WeightTensor(
                name=name,
                dtype=_DTYPES[state[name].dtype],
                shape=tuple(state[name].shape),
                offset_bytes=offset,
                num_bytes=raw.numel(),
            )
        )
        offset += raw.numel()
    manifest = WeightManifest(
        id=message_id(WeightManifest.tag(), pipeline, incarnation, version),
        pipeline=pipeline,
        incarnation=incarnation,
        version=version,
        tensors=tuple(tensors),
        num_bytes=num_bytes,
        num_chunks=-(-num_bytes // CHUNK_BYTES),
        chunk_bytes=CHUNK_BYTES,
        sha256=hashlib.sha256(payload).hexdigest(),
        model_config=model_config,
    )
    return manifest, view


def unpack(manifest: WeightManifest, payload: bytearray) -> dict[str, torch.Tensor]:
    """The state dict; its tensors share the payload's memory."""
    state: dict[str, torch.Tensor] = {}
    for tensor in manifest.tensors:
        flat = torch.frombuffer(
            payload,
            dtype=torch.uint8,
            count=tensor.num_bytes,
            offset=tensor.offset_bytes,
        )
        state[tensor.name] = flat.view(_TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
    return state
