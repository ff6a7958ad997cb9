"""`shuffle`: places as `unmanaged` does, moves every running sequence to the next rollout worker again
and again, and divides every device anew all the time. For tests and benchmarks; no source, since
nobody would want it."""

from __future__ import annotations

from jigsawrl.core import ids
from jigsawrl.core.migration import Move
from jigsawrl.core.policies.unmanaged import Unmanaged
from jigsawrl.core.shares import Wanted, equal
from jigsawrl.core.state import Pipeline, State

STAY_S = 0.05
"""Least stream time on a worker between two moves: some tokens of a small model."""

MAX_MOVES = 16
"""Of one sequence: where a move takes longer than a stay, it would never end."""

SPLIT_S = 0.3
"""Stream time of one division, and so of a hold: some steps of decoding, and far below all leases."""


class Shuffle(Unmanaged):
    """Moves each running sequence every 50 ms of stream time, 16 times at most, and turns the shares of
    a device every 300 ms."""

    name = "shuffle"
    every_tick = True

    def shares(self, state: State) -> Wanted:
        """Of n tenants each in turn is held, then has one part, two, and so on up to n - 1."""
        turn = int(state.clock.now_s / SPLIT_S)
        wanted = equal(state)
        for device, tenants in wanted.items():
            parts = [(place + turn) % len(tenants) for place in range(len(tenants))]
            if sum(parts):
                named = zip(tenants, parts, strict=True)
                wanted[device] = {name: part / sum(parts) for name, part in named}
        return wanted

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
