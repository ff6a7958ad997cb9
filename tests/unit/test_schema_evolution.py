"""What older versions wrote stays readable, leads to the same end, and allows no less than it did."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import pytest
from frozen_schema import end_of, freeze, frozen_schemas
from schema_widening import Widening

from jigsawrl.config import PipelineConfig, decode_config, encode_config
from jigsawrl.contract import codec
from jigsawrl.contract.message import SCHEMA_VERSION
from jigsawrl.contract.schema import schema_of
from jigsawrl.core.scheduler import Scheduler

KEPT = dict(frozen_schemas())
EACH = pytest.mark.parametrize("name", KEPT)


def widening(family: str, old: dict[str, Any]) -> list[str]:
    new = schema_of(family)
    return list(Widening(new, old).problems(new, old, family))


def test_there_is_something_to_hold_the_present_against() -> None:
    assert f"schema-{SCHEMA_VERSION}" in KEPT


@EACH
def test_every_message_that_was_written_is_still_read(name: str) -> None:
    num_read = 0
    for family, messages in KEPT[name].messages.items():
        decoder: codec.Decoder[Any] = getattr(codec, family.upper())
        for tag, payload in messages.items():
            assert decoder.decode(bytes.fromhex(payload)).tag() == tag
            num_read += 1
    assert num_read > 50


@EACH
def test_a_recorded_run_is_replayed_to_the_same_end(name: str) -> None:
    frozen = KEPT[name]
    scheduler, num_commands = Scheduler(), 0
    for entry in frozen.entries:
        event = codec.EVENTS.decode(entry.payload)
        commands = scheduler.handle(event, timestamp_s=entry.timestamp_s, sequence=entry.sequence)
        num_commands += len(commands)
    assert end_of(scheduler.state) == frozen.end
    assert [p["state"] for p in frozen.end.values()] == ["finished"]
    assert num_commands > 20


@EACH
def test_no_schema_allows_less_than_it_did(name: str) -> None:
    for family, old in KEPT[name].schemas.items():
        assert widening(family, old) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda tick: tick["properties"].pop("pipeline"), None),  # new since, with a default
        (lambda tick: tick["properties"].update(gone={"type": "integer"}), "gone: taken away"),
        (lambda tick: tick["required"].remove("id"), "id: new, and without a default"),
        (lambda tick: tick["properties"]["id"].pop("maxLength"), "maxLength was None, is 512"),
        (lambda tick: tick["properties"]["id"].update(type="integer"), "was integer, is string"),
        (lambda tick: tick["properties"]["type"].update(enum=["t"]), "no longer all allowed"),
    ],
)
def test_a_change_that_breaks_older_writers_is_found(change: Any, problem: str | None) -> None:
    old = copy.deepcopy(schema_of("events"))
    change(old["$defs"]["Tick"])
    found = widening("events", old)
    if problem is None:
        assert found == []
    else:
        assert any(problem in text for text in found), found


def test_a_schema_is_frozen_from_a_run_only_once(tmp_path: Any) -> None:
    (tmp_path / "schema-1").mkdir()
    with pytest.raises(FileExistsError):
        freeze(tmp_path, golden_folder=tmp_path)


def test_a_configuration_travels_without_what_is_off() -> None:
    """So a worker that does not know a feature yet runs the pipelines that do not ask for it."""
    text = msgspec.json.encode(
        {
            "name": "p",
            "model": {"type": "init"},
            "task": {"type": "sort-digits"},
            "trainer": {"num_steps": 1},
        }
    )
    config = msgspec.json.decode(text, type=PipelineConfig)
    fields = msgspec.msgpack.decode(encode_config(config))
    assert "tracking" not in fields
    assert "warmup" not in fields["model"]
    assert fields["evaluation"] == {"enabled": True, "max_running": 256}
    assert decode_config(encode_config(config)) == config
