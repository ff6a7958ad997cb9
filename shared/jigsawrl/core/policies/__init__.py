"""Policies: which pipelines run, where their tenants live, how devices are divided, which sequences
move. `POLICIES` are those one can choose."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jigsawrl.core.lookahead import greedy
from jigsawrl.core.policies.areal import Areal
from jigsawrl.core.policies.base import Policy
from jigsawrl.core.policies.jigsaw import Jigsaw
from jigsawrl.core.policies.rlix import Rlix
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.policies.shuffle import Shuffle
from jigsawrl.core.policies.unmanaged import Unmanaged, Unpinned

DEFAULT_POLICY = Serial.name

_CHOICES: tuple[Policy, ...] = (
    Serial(),
    Unmanaged(),
    Unpinned(),
    Areal(),
    Rlix(),
    Jigsaw(),
    Shuffle(),
)

_ABLATIONS: tuple[Policy, ...] = (
    Jigsaw("jigsaw-no-migration", merges=False),
    Jigsaw("jigsaw-no-shares", divides=False),
    Jigsaw("jigsaw-greedy", search=greedy),
    Jigsaw("jigsaw-no-prediction", predicts=False),
)

POLICIES: Mapping[str, Policy] = MappingProxyType(
    {policy.name: policy for policy in (*_CHOICES, *_ABLATIONS)}
)
"""`shuffle` (places as `unmanaged` does, moves every running sequence to the next rollout worker again
and again, and turns shares) is for tests and benchmarks of migration and has no source, since nobody
would want it; the ablations of `jigsaw` are for `jigsaw bench multiplex`."""
