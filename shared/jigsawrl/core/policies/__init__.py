"""Policies: which pipelines run, where their tenants live, how devices are divided, which sequences
move. `POLICIES` are those one can choose."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jigsawrl.core.policies.areal import Areal
from jigsawrl.core.policies.base import Policy
from jigsawrl.core.policies.jigsaw import Jigsaw
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.policies.shuffle import Shuffle
from jigsawrl.core.policies.unmanaged import Unmanaged

DEFAULT_POLICY = Serial.name

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (Serial(), Unmanaged(), Areal(), Jigsaw(), Shuffle())}
)
