"""What the scheduler knows of a pipeline: the part of its config that decisions depend on."""

from __future__ import annotations

from typing import Literal

import msgspec


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When the held-out set is evaluated: at version 0, every `every` versions, and at the last."""

    every: int | None
    """Versions between two evaluations; None = only before and after."""


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline as the scheduler sees it."""

    name: str
    mode: Literal["sync"]
    seed: int
    num_steps: int
    """Optimizer steps; the pipeline ends at this version."""
    groups_per_batch: int
    """B: groups that one optimizer step trains."""
    group_size: int
    """G: sequences per group."""
    min_group_size: int
    """A group with fewer survivors fails; at least 1."""
    num_rollout_workers: int
    evaluation: EvaluationSpec | None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device that its tenants live on; auto = GPUs where the cluster has any."""


class Device(msgspec.Struct, frozen=True, order=True):
    """One GPU, or one CPU slot (slot i = core i) on a machine without GPUs."""

    node: str
    index: int
    kind: Literal["cpu", "cuda"]
    memory_bytes: int

    @property
    def id(self) -> str:
        """``node/cpu0``."""
        return f"{self.node}/{self.kind}{self.index}"
