"""`shuffle`: places as `serial` does, and moves every running sequence to the next rollout worker again
and again. For tests and benchmarks of migration; no source, since nobody would want it."""

from __future__ import annotations

from jigsawrl.core import ids
from jigsawrl.core.migration import Move
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.state import Pipeline, State

STAY_S = 0.05
"""Least stream time on a worker between two moves: some tokens of a small model."""

MAX_MOVES = 16
"""Of one sequence: where a move takes longer than a stay, it would never end."""


class Shuffle(Serial):
    """Moves each running sequence every 50 ms of stream time, 16 times at most."""

    name = "shuffle"
    every_tick = True

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        """Round robin, in order of joining."""
        workers = [tenant.id for tenant in pipeline.usable("rollout")]
        following = dict(zip(workers, [*workers[1:], *workers[:1]], strict=True))
        moves = []
        for group in pipeline.groups.values():
            for sequence in group.sequences:
                if sequence.stage != "running" or sequence.owner is None:
                    continue
                stayed_s = state.clock.now_s - sequence.since_s
                target = following.get(sequence.owner.id)
                if target is None or stayed_s < STAY_S or sequence.num_moves >= MAX_MOVES:
                    continue
                name = ids.sequence_id(pipeline.name, group.number, sequence.index)
                moves.append(Move(sequence=name, target=target))
        return moves
