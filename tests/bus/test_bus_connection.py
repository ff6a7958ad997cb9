"""The connection: silent peers, closing, alarms."""

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from bus_samples import an_event, until
from secured import connect_as

from jigsawrl.bus.base import BusError
from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.connection import RECONNECT_PATIENCE_S, ROUND_TRIP_TIMEOUT_S, cancellation_kept
from jigsawrl.bus.server import EmbeddedServer, find_server


class Proxy:
    """Forwards bytes to a server until the connections of before are told to fall silent."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = asyncio.Event()
        self._open.set()
        self.num_connections = 0
        self._pumps: set[asyncio.Task[None]] = set()
        self._sinks: list[asyncio.StreamWriter] = []

    async def start(self) -> str:
        self._server = await asyncio.start_server(self._on_client, "127.0.0.1", 0)
        return f"nats://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """Of the connections of before, nothing goes through any more."""
        self._open.clear()
        self._open = asyncio.Event()
        self._open.set()

    def hold(self) -> None:
        """Nothing goes through, also of new connections."""
        self._open.clear()

    async def _on_client(self, reader, writer) -> None:
        self.num_connections += 1
        above_reader, above_writer = await asyncio.open_connection("127.0.0.1", self._target)
        for source, sink in ((reader, above_writer), (above_reader, writer)):
            self._sinks.append(sink)
            self._pumps.add(asyncio.create_task(self._pump(source, sink, self._open)))

    async def _pump(self, source, sink, open_: asyncio.Event) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await open_.wait()
                sink.write(data)
                await sink.drain()

    async def stop(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for sink in self._sinks:
            sink.close()
        await asyncio.gather(*(s.wait_closed() for s in self._sinks), return_exceptions=True)


async def test_a_peer_that_fell_silent_is_left_for_a_new_connection(
    own_server: EmbeddedServer, own_bus: NatsBus, prefix: str
):
    proxy = Proxy(own_server.port)
    bus = await connect(await proxy.start(), name="test", prefix=prefix)
    assert await bus.publish_event(an_event(1)) == 1
    proxy.silence()
    async with asyncio.timeout(15):
        assert await bus.publish_event(an_event(2)) == 2
        await until(lambda: proxy.num_connections == 2)
    await bus.close()
    await proxy.stop()


async def test_a_peer_that_fell_silent_over_tls_is_not_waited_for(
    secured_server: EmbeddedServer, credentials: Path
):
    """An orderly end of TLS takes an answer, which does not come."""
    proxy = Proxy(secured_server.port)
    url = (await proxy.start()).replace("nats:", "tls:")
    bus = await connect_as("scheduler", url, credentials / "red")
    first = await bus.publish_event(an_event(1))
    proxy.silence()
    async with asyncio.timeout(15):
        assert await bus.publish_event(an_event(2)) == first + 1
    assert proxy.num_connections == 2
    await bus.close()
    await proxy.stop()


@pytest.mark.slow
async def test_a_network_that_is_away_for_longer_than_our_patience_is_waited_for(
    secured_server: EmbeddedServer, credentials: Path
):
    proxy = Proxy(secured_server.port)
    url = (await proxy.start()).replace("nats:", "tls:")
    bus = await connect_as("scheduler", url, credentials / "red")
    first = await bus.publish_event(an_event(3))
    proxy.hold()
    publishing = asyncio.create_task(bus.publish_event(an_event(4)))
    await asyncio.sleep(RECONNECT_PATIENCE_S + ROUND_TRIP_TIMEOUT_S + 5)
    assert not publishing.done()
    proxy.silence()  # what is new goes through
    async with asyncio.timeout(30):
        assert await publishing == first + 1
    await bus.close()
    await proxy.stop()


async def test_nobody_there_is_said_in_one_line():
    started_s = time.monotonic()
    with pytest.raises(
        BusError, match=r"no NATS server answers at nats://127\.0\.0\.1:1 within 1 s"
    ):
        await connect("nats://127.0.0.1:1", name="test", timeout_s=1)
    assert time.monotonic() - started_s < 3


async def test_closing_takes_under_5_s_after_a_restart_of_the_server(own_server, own_bus, restart):
    reading = own_bus.read_events(0)
    waiting = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0.1)
    own_server.kill()
    await restart(own_server)
    await own_bus.publish_event(an_event(1))
    await waiting
    started_s = time.monotonic()
    await own_bus.close()
    assert time.monotonic() - started_s < 5
    with pytest.raises(BusError, match="closed"):
        await own_bus.publish_event(an_event(2))


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_closing_takes_under_5_s_when_the_server_does_not_answer(own_server, own_bus, how):
    await own_bus.publish_event(an_event(1))
    os.kill(own_server.pid, how)
    stopped = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    await until(lambda: psutil.Process(own_server.pid).status() in stopped)
    publishing = asyncio.create_task(own_bus.publish_event(an_event(2)))
    await asyncio.sleep(0.1)
    started_s = time.monotonic()
    await own_bus.close()
    assert time.monotonic() - started_s < 5
    with pytest.raises(BusError, match="closed"):
        await asyncio.wait_for(publishing, 2)


async def test_closing_finishes_what_is_being_stored(own_bus, own_server, prefix):
    publishing = [asyncio.create_task(own_bus.publish_event(an_event(n))) for n in range(50)]
    await asyncio.sleep(0)
    await own_bus.close()
    assert sorted(await asyncio.gather(*publishing)) == list(range(1, 51))


async def test_closing_twice_is_harmless(own_bus):
    await own_bus.close()
    await own_bus.close()


async def test_dropped_messages_raise_the_alarm(bus, caplog):
    link = await bus.connection.ready()

    async def slow(message: object) -> None:
        await asyncio.sleep(1)

    await link.client.subscribe("slow", cb=slow, pending_msgs_limit=2)
    for _ in range(10):
        await link.client.publish("slow", b"x")
    await until(lambda: bus.connection.num_slow_consumers > 0)
    assert "messages on slow were dropped" in caplog.text


async def test_a_cancellation_that_arrives_together_with_the_answer_is_not_lost() -> None:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def wait_for_it() -> str:
        with cancellation_kept():
            return await asyncio.wait_for(answer, 10)

    waiting = asyncio.create_task(wait_for_it())
    await asyncio.sleep(0)
    answer.set_result("stored")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.parametrize(
    "url",
    [
        "",
        ",",
        "nats://",
        "nats://127.0.0.1:99999",
        "nats://127.0.0.1:0",
        "nats://127.0.0.1:abc",
        "nats://[::1",
        "nats://a b:4222",
        "http://127.0.0.1:4222",
        "nats://127.0.0.1:4222,",
    ],
)
async def test_what_is_no_address_is_said_at_once(url: str):
    with pytest.raises(BusError, match=r"is no address of NATS: write nats://HOST:PORT"):
        await connect(url, name="test", timeout_s=60)


async def test_a_server_without_jetstream_is_named_as_the_reason(tmp_path: Path):
    log = tmp_path / "log"
    server = await asyncio.create_subprocess_exec(
        find_server(), "-a", "127.0.0.1", "-p", "-1", "-l", str(log)
    )
    await until(lambda: log.exists() and "Server is ready" in log.read_text())
    port = re.search(r"Listening for client connections on \S+:(\d+)", log.read_text())
    assert port is not None
    bus = await connect(f"nats://127.0.0.1:{port[1]}", name="test")
    with pytest.raises(BusError, match="JetStream does not answer: is this the cluster's address"):
        await bus.connection.call("look", lambda js: js.stream_info("X"))
    await bus.close()
    server.terminate()
    await server.wait()
