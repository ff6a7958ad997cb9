"""JSON Schema of every message family, for readers in other languages.

``python -m jigsawrl.contract.schema DIR`` writes one file per family; the checked-in ones lie in
``deploy/schemas`` and a test holds them current. On the wire messages are MessagePack maps of the
same shape: where a schema says ``contentEncoding: base64``, MessagePack has a ``bin``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.contract.commands import CommandType
from jigsawrl.contract.events import EventType
from jigsawrl.contract.records import RecordType
from jigsawrl.contract.requests import ReplyType, RequestType, TelemetryType

FAMILIES: dict[str, Any] = {
    "commands": CommandType,
    "events": EventType,
    "records": RecordType,
    "replies": ReplyType,
    "requests": RequestType,
    "telemetry": TelemetryType,
}
"""What one decoder reads; the key is the file's name."""


def schema_of(name: str) -> dict[str, Any]:
    """The JSON Schema of one family."""
    (schema,), components = msgspec.json.schema_components(
        (FAMILIES[name],), ref_template="#/$defs/{name}"
    )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"JigsawRL {name}",
        **schema,
        "$defs": components,
    }


def schema_files() -> dict[str, str]:
    """File name -> content."""
    return {
        f"{name}.json": json.dumps(schema_of(name), indent=2, sort_keys=True) + "\n"
        for name in FAMILIES
    }


def main(arguments: list[str]) -> int:
    """Write the files into the folder that is named."""
    if len(arguments) != 1:
        print("usage: python -m jigsawrl.contract.schema DIR", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in schema_files().items():
        (folder / name).write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
