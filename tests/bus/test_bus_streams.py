"""Streams, single records and snapshots."""

import msgspec
import pytest
from bus_samples import WORKER, a_command, a_record, an_event

from jigsawrl.bus.base import BusError, RecordGoneError
from jigsawrl.bus.client import connect
from jigsawrl.bus.server import start_server
from jigsawrl.contract.message import Ref


async def test_every_stream_refuses_new_messages_when_full_and_never_drops_stored_ones(bus):
    specs = [*bus.subjects.cluster_streams(), bus.subjects.data_stream("p")]
    for spec in specs:
        info = await bus.connection.call("look", lambda js, n=spec.name: js.stream_info(n))
        assert info.config.discard == "new"
        assert info.config.retention == spec.retention
        assert info.config.duplicate_window in (120.0, 120_000_000_000)


async def test_a_stream_that_exists_is_changed(bus):
    spec = msgspec.structs.replace(bus.subjects.data_stream("p"), max_bytes=1024 * 1024)
    await bus.create_streams([spec])
    info = await bus.connection.call("look", lambda js: js.stream_info(spec.name))
    assert info.config.max_bytes == 1024 * 1024


async def test_a_store_without_room_is_refused_with_the_bytes_needed(tmp_path):
    server = await start_server(tmp_path, max_store_bytes=10 * 1024 * 1024)
    bus = await connect(server.url, name="test")
    spec = msgspec.structs.replace(bus.subjects.data_stream("p"), max_bytes=20 * 1024 * 1024)
    with pytest.raises(BusError, match=rf"{spec.name}: it needs {20 * 1024 * 1024} bytes"):
        await bus.create_streams([spec])
    await bus.close()
    server.stop()


async def test_records_are_loaded_by_reference_until_purged(bus):
    refs = [await bus.store(a_record(number)) for number in range(3)]
    assert [await bus.load(ref) for ref in refs] == [a_record(number) for number in range(3)]
    await bus.purge(refs[0].stream, before=refs[2].sequence)
    with pytest.raises(RecordGoneError):
        await bus.load(refs[1])
    assert await bus.load(refs[2]) == a_record(2)
    assert (await bus.fill(refs[0].stream)).num_messages == 1


async def test_a_record_of_a_stream_that_does_not_exist_is_gone(bus):
    with pytest.raises(RecordGoneError):
        await bus.load(Ref("NO_SUCH_STREAM", 1))


async def test_purging_a_subject_leaves_the_others(bus):
    stream = bus.subjects.events_stream().name
    await bus.publish_event(an_event(0))
    await bus.publish_event(msgspec.structs.replace(an_event(1), pipeline="q"))
    await bus.purge(stream, subject=f"{bus.subjects.prefix}.event.p.>")
    assert (await bus.fill(stream)).num_messages == 1


async def test_a_purge_without_a_bound_is_refused(bus):
    with pytest.raises(ValueError, match="either"):
        await bus.purge(bus.subjects.events_stream().name)


async def test_missing_streams_are_empty_and_deleting_or_purging_them_is_no_error(bus):
    assert (await bus.fill("NO_SUCH_STREAM")).num_messages == 0
    await bus.delete_streams(["NO_SUCH_STREAM"])
    await bus.purge("NO_SUCH_STREAM", before=5)


async def test_the_last_two_snapshots_are_kept_newest_first(bus):
    assert await bus.load_snapshots() == []
    for payload in (b"one", b"two", b"three"):
        await bus.save_snapshot(payload)
    assert await bus.load_snapshots() == [b"three", b"two"]


async def test_what_lies_on_disk_outlives_the_server(own_server, own_bus, restart):
    ref = await own_bus.store(a_record(1))
    await own_bus.bind_commands(WORKER)
    await own_bus.publish_command(a_command(1))
    await own_bus.save_snapshot(b"one")
    own_server.kill()
    await restart(own_server)
    assert await own_bus.load(ref) == a_record(1)
    assert await own_bus.load_snapshots() == [b"one"]
    assert (await own_bus.fill(own_bus.subjects.commands_stream().name)).num_messages == 1
