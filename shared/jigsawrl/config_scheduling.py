"""The ``[scheduling]`` table: what a pipeline is promised where it competes with others.

Read by `jigsawrl.config`; the scheduler's policies keep it (`core.terms` says which of it contradicts
what else runs).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from jigsawrl.config_base import PositiveFloat, PositiveInt, Table
from jigsawrl.contract.spec import TermsSpec


class MemoryConfig(Table, frozen=True, kw_only=True):
    """What a tenant needs on its device, where the estimate (`jigsawrl.memory`) is off."""

    trainer_bytes: PositiveInt | None = None
    """Of one rank."""
    rollout_bytes: PositiveInt | None = None
    evaluation_bytes: PositiveInt | None = None


class SchedulingConfig(Table, frozen=True, kw_only=True):
    """Promises."""

    weight: PositiveFloat = 1.0
    """Of its finish among those of the pipelines of equal priority."""
    max_slowdown: Annotated[float, Meta(ge=1)] | None = None
    """Its steps take at most this many times as long as alone."""
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    """Higher starts first, and goes first where both want a device."""
    memory: MemoryConfig = MemoryConfig()

    def terms(self) -> TermsSpec:
        """As the scheduler gets them."""
        return TermsSpec(weight=self.weight, max_slowdown=self.max_slowdown, priority=self.priority)
