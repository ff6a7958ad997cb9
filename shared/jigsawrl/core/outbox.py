"""Collects the commands of one handled message and numbers them: id = "<stream sequence>.<index>"."""

from __future__ import annotations

from typing import TypedDict

from jigsawrl.contract.commands import Command
from jigsawrl.contract.message import Worker


class Head(TypedDict):
    """The fields that all commands share."""

    id: str
    cause: str
    leader_epoch: int
    worker: Worker


class Outbox:
    """Filled by one decision pass."""

    def __init__(self, *, sequence: int, cause: str, leader_epoch: int) -> None:
        self.commands: list[Command] = []
        self._sequence = sequence
        self._cause = cause
        self._leader_epoch = leader_epoch

    def to(self, worker: Worker) -> Head:
        """Head of the next command; it must be added before another head is taken."""
        return Head(
            id=f"{self._sequence}.{len(self.commands)}",
            cause=self._cause,
            leader_epoch=self._leader_epoch,
            worker=worker,
        )

    def add(self, command: Command) -> None:
        """Append one."""
        self.commands.append(command)
