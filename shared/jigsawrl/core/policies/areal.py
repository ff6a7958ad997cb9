"""`areal`: one pipeline at a time, generation and training always on devices of their own.

Source: AReaL's disaggregated placement (arXiv 2505.24298). The split is the pipeline's own
`rollout.num_workers` and `trainer.num_ranks`, so that a search over them finds the best. Deviation:
where there are too few devices to keep them apart, they share.
"""

from __future__ import annotations

from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.serial import next_alone
from jigsawrl.core.state import State


class Areal(Policy):
    """Starts the oldest queued pipeline when none is active."""

    name = "areal"

    def starts(self, state: State) -> list[Start]:
        """At most one."""
        return next_alone(state, apart=True)
