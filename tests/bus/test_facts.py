"""What a real server says of itself."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.facts import server_facts
from jigsawrl.bus.server import find_server, start_server
from jigsawrl.contract.events import Tick
from jigsawrl.contract.streams import MAX_PAYLOAD_BYTES


async def test_version_limits_streams_and_clock_are_told(bus: NatsBus) -> None:
    await bus.publish_event(Tick(id="t"))
    facts = await server_facts(bus.connection, bus.subjects)
    assert facts.max_payload_bytes == MAX_PAYLOAD_BYTES
    assert facts.without_jetstream is None
    streams = {stream.name: stream for stream in facts.streams}
    events = streams[bus.subjects.events_stream().name]
    assert (events.num_messages, events.max_bytes, events.refuses_when_full) == (1, 64 << 20, True)
    assert bus.subjects.data_stream("p").name in streams
    assert facts.num_bytes >= events.num_bytes > 0
    assert facts.clock_skew_s is not None
    assert abs(facts.clock_skew_s) < 2, "one machine, one clock; it may be busy"


async def test_streams_of_other_systems_on_the_server_are_left_out(bus: NatsBus) -> None:
    other = await connect(bus.connection.url, name="test", prefix=f"{bus.subjects.prefix}x")
    facts = await server_facts(other.connection, other.subjects)
    assert (facts.streams, facts.clock_skew_s) == ((), None)
    await other.close()


async def test_a_server_without_jetstream_says_so(tmp_path: Path) -> None:
    configured = await start_server(tmp_path / "store")
    url, program = configured.url, find_server()
    configured.stop()
    plain = await asyncio.create_subprocess_exec(
        *(program, "-a", "127.0.0.1", "-p", url.rsplit(":", 1)[1]), stderr=subprocess.DEVNULL
    )
    try:
        bus = await connect(url, name="test")
        facts = await server_facts(bus.connection, bus.subjects)
        assert facts.max_payload_bytes == 1 << 20, "the default"
        assert facts.without_jetstream is not None
        assert "ask about JetStream" in facts.without_jetstream
        await bus.close()
    finally:
        plain.kill()
        await plain.wait()
