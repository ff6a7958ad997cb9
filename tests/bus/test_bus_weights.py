"""The weight channel."""

import asyncio

import msgspec
import pytest
from bus_samples import some_weights

from jigsawrl.bus.base import BusError, RecordGoneError, StreamFullError
from jigsawrl.bus.client import NatsBus
from jigsawrl.contract.codec import encode
from jigsawrl.contract.records import WeightChunk

MEGABYTE = 1024 * 1024


async def num_stored(bus: NatsBus) -> int:
    return (await bus.fill(bus.subjects.weights_stream("p").name)).num_messages


@pytest.mark.parametrize("num_bytes", [20 * MEGABYTE, 3 * MEGABYTE + 7, 1, 0])
async def test_weights_come_out_as_they_went_in(bus, num_bytes):
    manifest, payload = some_weights(num_bytes)
    ref = await bus.publish_weights(manifest, memoryview(payload))
    assert await num_stored(bus) == manifest.num_chunks + 1
    assert await bus.fetch_weights(ref) == (manifest, bytearray(payload))


async def test_publishing_a_version_again_is_harmless(bus):
    manifest, payload = some_weights(3 * MEGABYTE)
    first = await bus.publish_weights(manifest, memoryview(payload))
    assert await bus.publish_weights(manifest, memoryview(payload)) == first
    assert await num_stored(bus) == 4


async def test_a_version_that_was_purged_can_be_published_again(bus):
    manifest, payload = some_weights(3 * MEGABYTE)
    await bus.publish_weights(manifest, memoryview(payload))
    await bus.retain_weights("p", [])
    ref = await bus.publish_weights(manifest, memoryview(payload))
    assert await bus.fetch_weights(ref) == (manifest, bytearray(payload))


async def test_a_rerun_version_with_other_bits_takes_the_place_of_the_first(bus):
    first, second = some_weights(3 * MEGABYTE), some_weights(3 * MEGABYTE)
    for manifest, payload in (first, second, first):
        ref = await bus.publish_weights(manifest, memoryview(payload))
        assert await bus.fetch_weights(ref) == (manifest, bytearray(payload))


async def test_a_corrupt_chunk_is_noticed(bus):
    manifest, payload = some_weights(2 * MEGABYTE)
    ref = await bus.publish_weights(manifest, memoryview(payload))
    chunk = WeightChunk(
        id="corrupt", pipeline="p", incarnation=0, version=0, index=1, data=b"\0" * MEGABYTE
    )
    subject = bus.subjects.record(chunk)
    await bus.connection.call("publish", lambda js: js.publish(subject, encode(chunk)))
    with pytest.raises(BusError, match="corrupt"):
        await bus.fetch_weights(ref)


async def test_a_missing_chunk_is_a_version_that_is_gone(bus):
    manifest, payload = some_weights(3 * MEGABYTE)
    ref = await bus.publish_weights(manifest, memoryview(payload))
    await bus.purge(ref.stream, subject=f"{bus.subjects.prefix}.weights.p.0.0.1.weight_chunk")
    with pytest.raises(RecordGoneError, match="1 of 3 chunks"):
        await bus.fetch_weights(ref)


async def test_a_chunk_that_comes_late_to_the_server_that_is_asked_is_waited_for(bus):
    """As on a server of a cluster that is behind the others."""
    manifest, payload = some_weights(3 * MEGABYTE)
    ref = await bus.publish_weights(manifest, memoryview(payload))
    stream = bus.subjects.weights_stream("p").name
    late = await bus.connection.call("take a chunk", lambda js: js.get_msg(stream, 1))
    await bus.connection.call("take a chunk", lambda js: js.delete_msg(stream, 1))
    fetching = asyncio.create_task(bus.fetch_weights(ref))
    while not await num_readers(bus):
        await asyncio.sleep(0)
    await bus.connection.call("bring it", lambda js: js.publish(late.subject, late.data))
    assert await fetching == (manifest, bytearray(payload))


async def num_readers(bus: NatsBus) -> int:
    stream = bus.subjects.weights_stream("p").name
    info = await bus.connection.call("look", lambda js: js.stream_info(stream))
    return info.state.consumer_count


async def test_versions_that_are_not_retained_are_removed(bus):
    refs = []
    for version in range(4):
        manifest, payload = some_weights(2 * MEGABYTE, version=version)
        refs.append(await bus.publish_weights(manifest, memoryview(payload)))
    await bus.retain_weights("p", [(0, 1), (0, 3)])
    assert await num_stored(bus) == 2 * 3
    for version in (0, 2):
        with pytest.raises(RecordGoneError):
            await bus.fetch_weights(refs[version])
    for version in (1, 3):
        assert (await bus.fetch_weights(refs[version]))[0].version == version
    await bus.retain_weights("p", [(1, 1), (1, 3)])
    assert await num_stored(bus) == 0


async def test_a_full_channel_says_how_many_bytes_are_needed(bus):
    spec = msgspec.structs.replace(bus.subjects.weights_stream("p"), max_bytes=4 * MEGABYTE)
    await bus.create_streams([spec])
    manifest, payload = some_weights(6 * MEGABYTE)
    with pytest.raises(StreamFullError, match=f"needs {6 * MEGABYTE} bytes"):
        await bus.publish_weights(manifest, memoryview(payload))
    await bus.retain_weights("p", [])
    manifest, payload = some_weights(2 * MEGABYTE)
    await bus.publish_weights(manifest, memoryview(payload))


async def test_more_than_two_gigabytes_are_refused_with_the_alternatives(bus):
    manifest, payload = some_weights(0)
    manifest = msgspec.structs.replace(manifest, num_bytes=2 * 1024**3 + 1)
    with pytest.raises(BusError, match="shared disk or a process group"):
        await bus.publish_weights(manifest, memoryview(payload))


async def test_weights_go_through_a_restart_of_the_server(own_server, own_bus, restart):
    manifest, payload = some_weights(30 * MEGABYTE)
    publishing = asyncio.create_task(own_bus.publish_weights(manifest, memoryview(payload)))
    await asyncio.sleep(0.05)
    own_server.kill()
    again = await restart(own_server)
    ref = await asyncio.wait_for(publishing, 15)
    fetching = asyncio.create_task(own_bus.fetch_weights(ref))
    await asyncio.sleep(0.05)
    again.kill()
    await restart(again)
    assert await asyncio.wait_for(fetching, 15) == (manifest, bytearray(payload))
