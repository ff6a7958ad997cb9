"""Policies that move sequences, for tests."""

from random import Random

from jigsawrl.core import ids
from jigsawrl.core.migration import Move, merge_tail
from jigsawrl.core.policies.serial import Serial
from jigsawrl.core.state import Pipeline, State


class RandomMoves(Serial):
    """Moves some running sequences in every pass: by a draw from the message's number, so that a replay
    draws the same. Also asks for moves that can't be made."""

    every_tick = True

    def __init__(self, share: float = 0.1) -> None:
        self._share = share

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        random = Random(f"{state.sequence}/{pipeline.name}")
        workers = [tenant.id for tenant in pipeline.tenants.values() if tenant.role == "rollout"]
        return [
            Move(
                sequence=ids.sequence_id(pipeline.name, group.number, sequence.index),
                target=random.choice([*workers, "nobody"]),
            )
            for group in pipeline.groups.values()
            for sequence in group.sequences
            if random.random() < self._share
        ]


class Merging(Serial):
    """Gathers every tail."""

    every_tick = True

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        return merge_tail(pipeline, max_sequences=8, now_s=state.clock.now_s)


class Once(Serial):
    """Makes the moves that a test puts into `orders`."""

    every_tick = True

    def __init__(self) -> None:
        self.orders: list[Move] = []

    def moves(self, state: State, pipeline: Pipeline) -> list[Move]:
        orders, self.orders = self.orders, []
        return orders
