"""The contract: golden bytes, tags, subjects, arrays, what readers ignore and refuse."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import msgspec
import pytest
from golden_messages import FOLDER, classes, golden, path_of

from jigsawrl.contract import codec
from jigsawrl.contract.codec import EVENTS, UndecodableError, encode
from jigsawrl.contract.events import (
    Heartbeat,
    PipelineCancelled,
    Tick,
    WeightsLoaded,
)
from jigsawrl.contract.message import Array, Message, Ref, Worker, message_id, snake_case
from jigsawrl.contract.records import SequenceRecord
from jigsawrl.contract.schema import main, schema_files, schema_of
from jigsawrl.contract.streams import Subjects, check_name

ALL = [(family, cls) for family, members in classes().items() for cls in members]
EACH = pytest.mark.parametrize(("family", "cls"), ALL, ids=[cls.tag() for _, cls in ALL])

SCHEMAS = Path(__file__).parents[2] / "deploy" / "schemas"


def decoder_of(family: str) -> codec.Decoder[Message]:
    return getattr(codec, family.upper())


@EACH
def test_golden_bytes_are_still_read_and_written(family: str, cls: type[Message]):
    payload = bytes.fromhex(path_of(cls).read_text())
    assert encode(golden(cls)) == payload
    assert decoder_of(family).decode(payload) == golden(cls)


@EACH
def test_golden_bytes_are_read_by_the_plain_msgpack_package(family: str, cls: type[Message]):
    fields = msgpack.unpackb(bytes.fromhex(path_of(cls).read_text()))
    assert fields["type"] == cls.tag() == snake_case(cls.__name__)
    assert fields["schema"] == 1
    assert fields["id"] == f"{cls.tag()}:p:1"
    assert set(fields) == {"type", *(field.name for field in msgspec.structs.fields(cls))}


@EACH
def test_unknown_fields_are_ignored(family: str, cls: type[Message]):
    fields = msgpack.unpackb(encode(golden(cls))) | {"added_later": {"x": [1]}}
    assert decoder_of(family).decode(msgpack.packb(fields)) == golden(cls)


@EACH
def test_messages_match_their_json_schema(family: str, cls: type[Message]):
    jsonschema.validate(json.loads(msgspec.json.encode(golden(cls))), schema_of(family))


def test_no_golden_file_is_left_without_a_class():
    assert {path.stem for path in FOLDER.glob("*.hex")} == {cls.tag() for _, cls in ALL}


def test_tags_are_unique():
    tags = [cls.tag() for _, cls in ALL]
    assert len(tags) == len(set(tags))


@EACH
def test_another_familys_message_is_undecodable(family: str, cls: type[Message]):
    other = "commands" if family != "commands" else "events"
    with pytest.raises(UndecodableError, match="type"):
        decoder_of(other).decode(encode(golden(cls)))


def test_subjects_are_unique_and_end_in_the_tag():
    subjects = Subjects()
    of = {
        "events": subjects.event,
        "commands": subjects.command,
        "records": subjects.record,
        "telemetry": subjects.telemetry,
    }
    found = {cls: of[family](golden(cls)) for family, cls in ALL if family in of}
    assert len(set(found.values())) == len(found)
    for cls, subject in found.items():
        assert subject.rsplit(".", 1)[1] == cls.tag()


def test_each_subject_lies_on_one_stream():
    subjects = Subjects()
    specs = [
        *subjects.cluster_streams(),
        subjects.data_stream("pipeline"),
        subjects.weights_stream("pipeline"),
    ]
    names = [spec.name for spec in specs]
    assert len(names) == len(set(names))
    bases = [subject.rstrip(">") for spec in specs for subject in spec.subjects]
    for base in bases:
        assert sum(other.startswith(base) for other in bases) == 1
    for family, cls in ALL:
        if family in ("events", "commands", "records"):
            subject = getattr(subjects, family[:-1])(golden(cls))
            assert sum(subject.startswith(base) for base in bases) == 1


def test_a_boots_filter_takes_its_commands_and_no_other_boots():
    subjects = Subjects()
    worker = Worker(id="p.rollout0", boot="b1")
    assert subjects.commands_of(worker) == "jig.command.p.rollout0.b1.>"


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x90",
        b"\x80",
        msgpack.packb({"type": "unknown", "id": "x"}),
        msgpack.packb({"type": "tick"}),
        msgpack.packb({"type": "tick", "id": 3}),
        msgpack.packb({"type": "tick", "id": "x", "schema": 3}),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_message_is_undecodable_in_one_line(payload: bytes):
    with pytest.raises(UndecodableError) as error:
        codec.EVENTS.decode(payload)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["id", "boot"])
@pytest.mark.parametrize("name", ["node\n", "no\nde", "\n", "a b", "*", ">", "a.>", "a" * 81])
def test_a_worker_whose_name_is_no_part_of_a_subject_is_undecodable(field: str, name: str):
    sent = msgpack.unpackb(encode(Heartbeat(id="h", node=Worker(id="node", boot="b"))))
    assert codec.EVENTS.decode(msgpack.packb(sent))
    with pytest.raises(UndecodableError, match="node"):
        codec.EVENTS.decode(msgpack.packb(sent | {"node": sent["node"] | {field: name}}))


def test_an_event_of_the_cluster_has_no_pipeline():
    assert Subjects().event(Tick(id="t")) == "jig.event._cluster.tick"
    event = PipelineCancelled(id="c", pipeline="p", reason="")
    assert Subjects("other").event(event) == "other.event.p.pipeline_cancelled"


# --- Arrays and references -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "values"),
    [
        ("int32", [-1, 2**31 - 1]),
        ("int64", [-(2**63)]),
        ("float32", [0.5, -2.0]),
        ("uint8", [0, 255]),
        ("int32", []),
    ],
)
def test_arrays_keep_their_values(dtype: str, values: list[float]):
    array = Array.of(dtype, values)
    assert array.tolist() == values
    assert array.shape == (len(values),)


def test_arrays_are_little_endian():
    assert Array.of("int32", [1]).data == b"\x01\0\0\0"


@pytest.mark.parametrize(
    ("shape", "data"), [((2,), b"\0" * 7), ((-1,), b""), ((2, 2), b"\0" * 8), ((), b"")]
)
def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused(shape: tuple[int, ...], data: bytes):
    with pytest.raises(ValueError, match="shape"):
        Array(dtype="int32", shape=shape, data=data)


def test_a_bad_array_on_the_wire_is_undecodable():
    fields = msgpack.unpackb(encode(golden(SequenceRecord)))
    fields["tokens"]["shape"] = [3]
    with pytest.raises(UndecodableError, match="needs 12 bytes"):
        codec.RECORDS.decode(msgpack.packb(fields))


def test_a_sequence_record_has_arrays_of_one_length():
    with pytest.raises(ValueError, match="differ in length"):
        msgspec.structs.replace(golden(SequenceRecord), tokens=Array.of("int32", [1]))


@pytest.mark.parametrize(
    "change",
    [
        {"worker": {"id": "p.rollout0", "boot": "a b"}},
        {"worker": {"id": "p.rollout0.>", "boot": "b"}},
        {"worker": {"id": "p.*", "boot": "b"}},
        {"worker": {"id": "", "boot": "b"}},
        {"version": -1},
        {"version": 2**60},
        {"id": "x" * 600},
        {"cause": "x" * 600},
    ],
)
def test_what_could_break_a_reader_later_is_not_decoded(change: dict[str, Any]) -> None:
    event = WeightsLoaded(
        id="w", pipeline="p", worker=Worker("p.rollout0", "b"), incarnation=0, version=1
    )
    good = msgpack.unpackb(encode(event))
    assert EVENTS.decode(msgpack.packb(good)) == event
    with pytest.raises(UndecodableError):
        EVENTS.decode(msgpack.packb(good | change))


def test_a_reference_starts_at_one():
    with pytest.raises(ValueError, match="1 or more"):
        Ref("S", 0)


def test_ids_join_their_parts():
    assert message_id("tag", "p/g", 2) == "tag:p/g:2"


@pytest.mark.parametrize("name", ["", "a.b", "a b", "-a", "a" * 64, "ä", "a>", "*"])
def test_names_that_can_be_no_subject_token_are_refused(name: str):
    with pytest.raises(ValueError, match="pipeline"):
        check_name(name, "pipeline")


# --- Schemas -------------------------------------------------------------------------------------


def test_the_checked_in_schemas_are_current():
    found = {path.name: path.read_text() for path in SCHEMAS.iterdir()}
    assert found == schema_files(), "run: python -m jigsawrl.contract.schema deploy/schemas"


def test_schemas_are_written_by_the_module(tmp_path: Path):
    assert main([str(tmp_path / "schemas")]) == 0
    assert {path.name for path in (tmp_path / "schemas").iterdir()} == set(schema_files())
    assert main([]) == 2
