"""Keeps a schema as it is now, so that later versions are held to what this one wrote.

``python tests/unit/frozen_schema.py RUN`` writes ``golden/schema-<version>/`` from the classes and from
a finished run: one message of each kind as bytes, the JSON Schemas, and the run's whole event stream
with where it led. To be done once for each `SCHEMA_VERSION`, by the last commit before it is raised;
what is there already stays.
"""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from golden_messages import classes, golden

from jigsawrl.contract.codec import encode
from jigsawrl.contract.message import SCHEMA_VERSION
from jigsawrl.contract.schema import FAMILIES, schema_of
from jigsawrl.core.state import State
from jigsawrl.core.status import pipeline_status
from services.scheduler.recorded import last_state
from services.scheduler.segments import Entry, read_segments

GOLDEN = Path(__file__).parent / "golden"


class Frozen(NamedTuple):
    """One schema as it was."""

    messages: dict[str, dict[str, str]]
    """By family and tag: bytes, in hexadecimal."""
    schemas: dict[str, Any]
    """By family."""
    entries: list[Entry]
    """The event stream of one run, all of it."""
    end: dict[str, Any]
    """What it led to: see `end_of`."""


def frozen_schemas() -> Iterator[tuple[str, Frozen]]:
    """All that are kept, by name."""
    for folder in sorted(GOLDEN.glob("schema-*")):
        yield (
            folder.name,
            Frozen(
                messages=json.loads(_unpacked(folder / "messages.z")),
                schemas=json.loads(_unpacked(folder / "schemas.z")),
                entries=msgspec.msgpack.decode(_unpacked(folder / "run.z"), type=list[Entry]),
                end=json.loads((folder / "end.json").read_text()),
            ),
        )


def end_of(state: State) -> dict[str, Any]:
    """What a run has come to: facts, which no later policy decides otherwise."""
    found = {}
    for name, pipeline in state.pipelines.items():
        status = pipeline_status(state, pipeline)
        fields = msgspec.json.decode(msgspec.json.encode(status))
        found[name] = {
            key: fields[key]
            for key in (
                "state",
                "version",
                "incarnation",
                "groups",
                "sequences",
                "evaluations",
                "metrics",
                "num_trained_tokens",
                "failure",
            )
        }
    return found


def freeze(run: Path, *, golden_folder: Path = GOLDEN) -> Path:
    """Write the files; where."""
    folder = golden_folder / f"schema-{SCHEMA_VERSION}"
    folder.mkdir(parents=True)
    messages = {
        family: {cls.tag(): encode(golden(cls)).hex() for cls in members}
        for family, members in classes().items()
    }
    _pack(folder / "messages.z", json.dumps(messages).encode())
    schemas = {family: schema_of(family) for family in FAMILIES}
    _pack(folder / "schemas.z", json.dumps(schemas).encode())
    entries = [_anywhere(entry) for entry in read_segments(run / "scheduler" / "events")]
    _pack(folder / "run.z", msgspec.msgpack.encode(entries))
    end = end_of(last_state(run / "scheduler"))
    (folder / "end.json").write_text(json.dumps(end, indent=1) + "\n")
    return folder


def _anywhere(entry: Entry) -> Entry:
    """Without the names of the machine that it ran on, by which nothing is decided."""
    fields = msgspec.msgpack.decode(entry.payload)
    if "leader" in fields:
        fields["leader"] = "scheduler"
    if "path" in fields:
        fields["path"] = "/runs/" + Path(fields["path"]).name
    return msgspec.structs.replace(entry, payload=msgspec.msgpack.encode(fields))


def _pack(path: Path, content: bytes) -> None:
    path.write_bytes(zlib.compress(content, 9))


def _unpacked(path: Path) -> bytes:
    return zlib.decompress(path.read_bytes())


if __name__ == "__main__":
    print(freeze(Path(sys.argv[1])))
