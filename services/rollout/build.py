"""Builds the engine that a pipeline's config names, on the tenant's device."""

from __future__ import annotations

from jigsawrl.config import PipelineConfig
from services.rollout.engine.base import Engine
from services.run import RefusedError


def build_engine(
    config: PipelineConfig,
    *,
    device: str | None,
    greedy: bool,
    tail_sequences: int | None = None,
) -> Engine:
    """`device` is a device id (``node/cuda0``) or None for a tenant started by hand; `greedy` is for
    evaluation; `tail_sequences` is the scheduler's, None for the engine's default. Raises
    `RefusedError` where the device isn't usable."""
    import torch

    from jigsawrl.models.device import choose_device
    from jigsawrl.models.loading import DTYPES
    from services.rollout.engine.lengths import DrawnLengths
    from services.rollout.engine.sampling import Sampling
    from services.rollout.engine.torch_engine import TorchEngine

    torch.set_num_threads(1)  # tenants share cores; several threads each run ten times slower
    try:
        torch_device = choose_device(config.device, device)
    except ValueError as error:
        raise RefusedError(str(error)) from error
    wanted, on_cpu = config.rollout.engine.deterministic, torch_device.type == "cpu"
    sampling = config.rollout.sampling
    max_running = config.rollout.engine.max_running
    law, lengths = config.rollout.engine.drawn_lengths, None
    if greedy:
        max_running = config.evaluation.max_running
    elif law is not None:
        lengths = DrawnLengths(
            median_tokens=law.median_tokens, p95_tokens=law.p95_tokens, max_tokens=law.max_tokens
        )
    return TorchEngine(
        sampling=Sampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_new_tokens=sampling.max_new_tokens,
            greedy=greedy,
        ),
        max_running=max_running,
        device=torch_device,
        dtype=DTYPES[config.rollout.engine.dtype],
        deterministic="preferred" if wanted == "auto" and on_cpu else wanted is True,
        lengths=lengths,
        tail_sequences=tail_sequences,
    )
