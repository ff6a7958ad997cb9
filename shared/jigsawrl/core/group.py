"""A prompt with its samples, as the scheduler knows them: part of `state.State`."""

from __future__ import annotations

from typing import Literal

import msgspec

from jigsawrl.contract.message import Ref, Worker

SequenceStage = Literal[
    "waiting", "placed", "running", "moving", "finished", "scoring", "scored", "failed"
]
GENERATING: tuple[SequenceStage, ...] = ("placed", "running", "moving")
"""Stages in which a rollout worker owns a sequence; it is asked for it back while ``moving``."""


class Sequence(msgspec.Struct):
    """One sample of a live group."""

    index: int
    epoch: int = 1
    """Owner epoch: rises whenever its work is taken from a worker."""
    stage: SequenceStage = "waiting"
    owner: Worker | None = None
    """The rollout worker (placed, running, moving) or reward worker (scoring) that has it."""
    since_s: float = 0.0
    """Stream time at which the owner got it, or was asked to hand it over."""
    target: str | None = None
    """Rollout worker that it moves to; from the order on until it is placed there."""
    num_moves: int = 0
    moved_s: float = 0.0
    """Stream time of the last order to move it."""
    avoid: str | None = None
    """A worker that let the accept lease expire."""
    num_missing: int = 0
    """Inventories in a row of its owner that did not name it."""
    resume: Ref | None = None
    num_resumed: int = 0
    """Tokens in `resume`."""
    resume_version: int = 0
    """Newest version in `resume`, as far as known: the next owner has it, too."""
    restarts: list[int] = []
    """`num_resumed` at each time when its owner was lost: what came after was made again."""
    record: Ref | None = None
    reward: Ref | None = None
    score: float | None = None
    """The reward's value."""
    min_version: int | None = None
    max_version: int | None = None
    """Oldest and newest version that made (or may have made) a token; None before placement."""


class Group(msgspec.Struct):
    """One prompt with its samples, from admission to a checkpoint that covers its training."""

    number: int
    cursor: int
    data_floor: int
    """Last data-stream sequence known at admission: its records all lie above."""
    sequences: list[Sequence]
    epoch: int = 1
    owner: Worker | None = None
    """The environment that makes its prompt."""
    since_s: float = 0.0
    prompt: Ref | None = None

    def max_version(self, newest: int) -> int:
        """Newest version that may have made a token of it; -1 where there is no token. Weights land
        in mid-sequence: one that runs, or is to go on from a partial record, may have tokens of the
        `newest`."""
        versions = [
            newest if s.stage in GENERATING or s.resume is not None else s.max_version
            for s in self.sequences
        ]
        return max((v for v in versions if v is not None), default=-1)

    @property
    def num_survivors(self) -> int:
        """Sequences that have not failed."""
        return sum(s.stage != "failed" for s in self.sequences)

    @property
    def complete(self) -> bool:
        """Nothing of it is still being worked on."""
        return self.prompt is not None and all(
            s.stage in ("scored", "failed") for s in self.sequences
        )
