"""The consumer loop of one boot's commands."""

import asyncio
import os
import signal
import time

import pytest
from bus_samples import WORKER, a_command, dead_letters, in_background, until

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus
from jigsawrl.bus.commands import consumer_name
from jigsawrl.bus.server import EmbeddedServer
from jigsawrl.contract.message import Worker
from tests.freezing import freeze


class Recorder:
    """A handler that notes what it is called with, and fails as often as told."""

    def __init__(self, *, failures: dict[str, int] | None = None, work_s: float = 0) -> None:
        self.called: list[str] = []
        self.called_at_s: list[float] = []
        self.done: list[str] = []
        self.num_working = 0
        self.most_working = 0
        self._failures = failures or {}
        self._work_s = work_s

    async def __call__(self, command) -> None:
        self.called.append(command.id)
        self.called_at_s.append(time.monotonic())
        self.num_working += 1
        self.most_working = max(self.most_working, self.num_working)
        try:
            if self._work_s:
                await asyncio.sleep(self._work_s)
            if self._failures.get(command.id, 0) > 0:
                self._failures[command.id] -= 1
                raise RuntimeError("out of luck")
        finally:
            self.num_working -= 1
        self.done.append(command.id)


def ids(*numbers: int) -> list[str]:
    return [f"c:{number}" for number in numbers]


async def num_stored(bus: NatsBus) -> int:
    return (await bus.fill(bus.subjects.commands_stream().name)).num_messages


async def test_commands_are_handled_in_order_and_removed_once_acked(bus):
    await bus.bind_commands(WORKER)
    for number in range(50):
        await bus.publish_command(a_command(number))
    assert await num_stored(bus) == 50
    handler = Recorder()
    async with in_background(bus.consume_commands(WORKER, handler)):
        await until(lambda: len(handler.done) == 50)
        await asyncio.sleep(0.1)
    assert handler.called == ids(*range(50))
    assert await num_stored(bus) == 0


async def test_a_command_is_kept_until_its_handler_returned(bus):
    await bus.bind_commands(WORKER)
    await bus.publish_command(a_command(0))
    handler = Recorder(work_s=0.5)
    async with in_background(bus.consume_commands(WORKER, handler)):
        await until(lambda: handler.num_working == 1)
        assert await num_stored(bus) == 1


async def test_an_old_boots_commands_reach_no_new_boot(bus):
    other = Worker(id=WORKER.id, boot="b2")
    await bus.bind_commands(WORKER)
    await bus.bind_commands(other)
    await bus.publish_command(a_command(0))
    await bus.publish_command(a_command(1, worker=other))
    handler = Recorder()
    async with in_background(bus.consume_commands(other, handler)):
        await until(lambda: handler.done == ids(1))
    assert handler.called == ids(1)


async def test_commands_for_a_boot_that_nobody_consumes_are_not_kept(bus):
    await bus.publish_command(a_command(0))
    assert await num_stored(bus) == 0


async def test_a_handler_that_raises_is_called_again_later_and_order_holds(bus):
    await bus.bind_commands(WORKER)
    for number in range(3):
        await bus.publish_command(a_command(number))
    handler = Recorder(failures={"c:0": 2})
    async with in_background(bus.consume_commands(WORKER, handler)):
        await until(lambda: len(handler.done) == 3)
    assert handler.called == ids(0, 0, 0, 1, 2)
    first, second, third = handler.called_at_s[:3]
    assert 0.1 <= second - first < third - second
    assert bus.num_dead_letters == 0


async def test_after_five_failures_a_command_is_a_dead_letter_and_the_next_is_handled(bus):
    await bus.bind_commands(WORKER)
    await bus.publish_command(a_command(0))
    await bus.publish_command(a_command(1))
    handler = Recorder(failures={"c:0": 99})
    async with in_background(bus.consume_commands(WORKER, handler)):
        await until(lambda: handler.done == ids(1), within_s=15)
    assert handler.called == ids(0, 0, 0, 0, 0, 1)
    [letter] = await dead_letters(bus)
    assert "5 failures" in letter.reason
    assert "out of luck" in letter.reason
    assert await num_stored(bus) == 0


async def test_an_undecodable_command_is_a_dead_letter_and_the_next_is_handled(bus):
    await bus.bind_commands(WORKER)
    subject = bus.subjects.command(a_command(0))
    await bus.connection.call("publish", lambda js: js.publish(subject, b"\xc1"))
    await bus.publish_command(a_command(1))
    handler = Recorder()
    async with in_background(bus.consume_commands(WORKER, handler)):
        await until(lambda: handler.done == ids(1))
    [letter] = await dead_letters(bus)
    assert letter.subject == subject
    assert letter.pipeline == "p"


async def test_no_more_commands_are_handled_at_once_than_allowed(bus):
    await bus.bind_commands(WORKER)
    for number in range(40):
        await bus.publish_command(a_command(number))
    handler = Recorder(work_s=0.02)
    async with in_background(bus.consume_commands(WORKER, handler, concurrency=4)):
        await until(lambda: len(handler.done) == 40)
    assert handler.most_working == 4


async def test_a_long_handler_reports_progress_and_bears_a_redelivery(bus):
    await bus.bind_commands(WORKER)
    await bus.publish_command(a_command(0))
    link = await bus.connection.ready()
    stream = bus.subjects.commands_stream().name
    acks = await link.client.subscribe("$JS.ACK.>")
    handler = Recorder(work_s=7)
    async with in_background(bus.consume_commands(WORKER, handler)) as consuming:
        async with asyncio.timeout(7):
            ack = await acks.next_msg(timeout=7)
            while stream not in ack.subject:
                ack = await acks.next_msg(timeout=7)
        assert ack.data == b"+WPI"
        # As after `ack_wait`: a negative ack brings the command back at once.
        await link.client.publish(ack.subject, b"-NAK")
        await until(lambda: handler.done == ids(0))
        await asyncio.sleep(0.3)
        assert not consuming.done()
    assert handler.called == ids(0)
    assert await num_stored(bus) == 0


async def test_consuming_goes_on_after_the_server_was_killed_and_restarted(
    own_server: EmbeddedServer, own_bus: NatsBus, restart
):
    await own_bus.bind_commands(WORKER)
    handler = Recorder()
    async with in_background(own_bus.consume_commands(WORKER, handler)):
        await own_bus.publish_command(a_command(0))
        await until(lambda: handler.done == ids(0))
        own_server.kill()
        await restart(own_server)
        await own_bus.publish_command(a_command(1))
        await until(lambda: handler.done == ids(0, 1))


async def test_consuming_goes_on_after_the_server_stood_still(own_server, own_bus):
    await own_bus.bind_commands(WORKER)
    handler = Recorder()
    async with in_background(own_bus.consume_commands(WORKER, handler)):
        await own_bus.publish_command(a_command(0))
        await until(lambda: handler.done == ids(0))
        freeze(own_server.pid)
        await asyncio.sleep(3.6)
        os.kill(own_server.pid, signal.SIGCONT)
        await own_bus.publish_command(a_command(1))
        await until(lambda: handler.done == ids(0, 1))


async def test_a_consumer_that_is_gone_ends_its_boot_since_commands_went_with_it(bus):
    await bus.bind_commands(WORKER)
    handler = Recorder()
    async with in_background(bus.consume_commands(WORKER, handler)) as consuming:
        await bus.publish_command(a_command(0))
        await until(lambda: handler.done == ids(0))
        stream, name = bus.subjects.commands_stream().name, consumer_name(WORKER)
        await bus.connection.call("delete", lambda js: js.delete_consumer(stream, name))
        await bus.publish_command(a_command(1))  # nobody's interest: the server drops it
        with pytest.raises(BusError, match=r"is gone, and commands with it"):
            await asyncio.wait_for(asyncio.shield(consuming), 10)


async def test_consuming_ends_when_the_bus_is_closed(own_bus):
    await own_bus.bind_commands(WORKER)
    async with in_background(own_bus.consume_commands(WORKER, Recorder())) as consuming:
        await asyncio.sleep(0.1)
        await own_bus.close()
        await asyncio.wait_for(consuming, 2)
