"""`areal`: one pipeline at a time, generation and training always on devices of their own.

Source: AReaL's disaggregated placement (arXiv 2505.24298). The split is the pipeline's own
`rollout.num_workers` and `trainer.num_ranks`, so that a search over them finds the best. Deviation:
where there are too few devices to keep them apart, they share.
"""

from __future__ import annotations

from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.policies.serial import one_after_another
from jigsawrl.core.policies.starting import start_all
from jigsawrl.core.state import Pipeline, State


class Areal(Policy):
    """The first pipeline that has not ended its work has all devices, divided in two."""

    name = "areal"

    def starts(self, state: State) -> list[Start]:
        """All that devices exist for."""
        return start_all(state, in_turns=True, apart=True)

    def turn(self, state: State, pipeline: Pipeline) -> str | None:
        """After those before it."""
        return one_after_another(state, pipeline)
