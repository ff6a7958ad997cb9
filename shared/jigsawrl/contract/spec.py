"""What the scheduler knows of a pipeline: the part of its config that decisions depend on."""

from __future__ import annotations

from typing import Literal

import msgspec

from jigsawrl.contract.message import Count, Role


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """When the held-out set is evaluated: at version 0, every `every` versions, and at the last."""

    every: Count | None
    """Versions between two evaluations; None = only before and after."""


class DynamicSamplingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Groups whose rewards are all equal teach nothing: they are filtered, others take their slots."""

    max_batches: Count
    """Groups filtered for one step, in batches, before the rule below."""
    when_exhausted: Literal["fail", "keep", "train_smaller"]
    """``fail`` the pipeline; ``keep`` uniform groups until the next cut; ``train_smaller`` cut what
    there is, one group at least."""


class TermsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline is promised where it competes with others."""

    weight: float = 1.0
    """Of its finish among those of equal priority, above 0."""
    max_slowdown: float | None = None
    """Time for its steps over the time alone, 1 or more; None = no cap."""
    priority: int = 0
    """Higher goes first."""


class MemorySpec(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant of a role needs on its device, in bytes; 0 = not counted."""

    trainer: Count = 0
    rollout: Count = 0
    evaluation: Count = 0

    def of(self, role: Role) -> int:
        """Of a role; environment and reward need no device."""
        needs: dict[Role, int] = {
            "trainer": self.trainer,
            "rollout": self.rollout,
            "evaluation": self.evaluation,
        }
        return needs.get(role, 0)


class PipelineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline as the scheduler sees it."""

    name: str
    mode: Literal["sync", "async"]
    """For people: decisions depend on the three numbers below, which are 0, 0 and 1 in `sync`."""
    seed: int
    num_steps: Count
    """Optimizer steps; the pipeline ends at this version."""
    groups_per_batch: Count
    """B: groups that one optimizer step trains."""
    group_size: Count
    """G: sequences per group."""
    min_group_size: Count
    """A group with fewer survivors fails; at least 1."""
    num_rollout_workers: Count
    num_trainer_ranks: Count = 1
    """Tenants that train together, as one gang."""
    evaluation: EvaluationSpec | None
    max_staleness: Count = 0
    """eta: versions that admission lets a batch's tokens lag behind the version it trains from."""
    sample_bound: Count = 0
    """A group with a token older than this is not trained, but dropped as stale."""
    pipeline_depth: Count = 1
    """Batches in flight at once, the one in training included."""
    dynamic_sampling: DynamicSamplingSpec | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Kind of device that its tenants live on; auto = GPUs where the cluster has any."""
    terms: TermsSpec = TermsSpec()
    memory: MemorySpec = MemorySpec()


class Device(msgspec.Struct, frozen=True, order=True):
    """One GPU, or one CPU slot (slot i = core i) on a machine without GPUs."""

    node: str
    index: Count
    kind: Literal["cpu", "cuda"]
    memory_bytes: Count

    @property
    def id(self) -> str:
        """``node/cpu0``."""
        return f"{self.node}/{self.kind}{self.index}"
