"""`unmanaged`: all pipelines at once, with equal weights, no holds and no migration: what the operating
system gives for free.

Source: ours, as a baseline for `jigsaw`. Trainers and rollout workers of different pipelines are spread
over the devices, so that none is idle while another has two of a kind.
"""

from __future__ import annotations

from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.state import State


class Unmanaged(Policy):
    """Starts every queued pipeline at once."""

    name = "unmanaged"

    def starts(self, state: State) -> list[Start]:
        """All that devices exist for."""
        return start_all(state)


class Unpinned(Unmanaged):
    """The same with tenants that may run on any core, as processes do that nobody places."""

    name = "unmanaged-unpinned"
    pins = False
