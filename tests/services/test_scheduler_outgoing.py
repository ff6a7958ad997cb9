"""Commands on their way while the bus takes none."""

import asyncio
from typing import Any, cast

import pytest

from jigsawrl.bus.base import Bus
from jigsawrl.contract.commands import Command, Drop
from jigsawrl.contract.message import Worker
from jigsawrl.core.state import State
from services.scheduler.outgoing import MAX_PENDING, Outgoing


class FullBus:
    """Takes no command until told."""

    def __init__(self) -> None:
        self.room = asyncio.Event()
        self.stored: list[str] = []

    async def publish_command(self, command: Command) -> int:
        await self.room.wait()
        self.stored.append(command.id)
        return len(self.stored)


def commands(num: int) -> list[Any]:
    worker = Worker(id="p.rollout0", boot="b")
    return [
        Drop(id=f"c:{number}", worker=worker, leader_epoch=1, sequences=()) for number in range(num)
    ]


async def test_the_leader_folds_on_while_commands_wait_up_to_a_bound() -> None:
    bus = FullBus()
    async with asyncio.TaskGroup() as group:
        outgoing = Outgoing(cast(Bus, bus), group, State())
        async with asyncio.timeout(5):
            await outgoing.send(commands(MAX_PENDING))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await outgoing.send(commands(1))
        assert bus.stored == []
        bus.room.set()
        async with asyncio.timeout(5):
            await outgoing.settle()
    assert bus.stored == [*(c.id for c in commands(MAX_PENDING)), "c:0"]
