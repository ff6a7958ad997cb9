"""One instance of every message class, each field filled; `golden/` holds their bytes.

``python tests/unit/golden_messages.py`` writes the files of classes that have none yet. Those that
exist stay as they are; delete the file of a class whose fields were changed on purpose.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from jigsawrl.contract.codec import encode
from jigsawrl.contract.message import Array, Message, Ref, Worker
from jigsawrl.contract.schema import FAMILIES

FOLDER = Path(__file__).parent / "golden"

ARRAY_FIELDS = {
    "logprobs": Array.of("float32", [0.0, -0.5]),
    "loss_mask": Array.of("uint8", [0, 1]),
    "versions": Array.of("int32", [-1, 3]),
}


def classes() -> dict[str, list[type[Message]]]:
    """Family -> its message classes."""
    return {
        name: list(get_args(family)) or [family]  # a union, or one class alone
        for name, family in FAMILIES.items()
    }


def golden(cls: type[Message]) -> Message:
    """The instance of `cls`, the same on every call."""
    message = _value(cls, "")
    assert isinstance(message, Message)
    return message


def _value(kind: Any, name: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _value(arguments[0], name)
    if origin is Literal:
        return arguments[0]
    if origin is Annotated:
        return _value(arguments[0], name)
    if origin is tuple:
        items = arguments[:1] if arguments[-1] is ... else arguments
        return tuple(_value(item, name) for item in items)
    if origin is dict:
        return {"key": _value(arguments[1], name)}
    if kind is Array:
        return ARRAY_FIELDS.get(name, Array.of("int32", [7, 8]))
    if kind is Ref:
        return Ref("JIG_DATA_p", 5)
    if kind is Worker:
        return Worker(id="p.rollout0", boot="b1")
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = msgspec.structs.fields(kind)
        return kind(**{field.name: _field(kind, field) for field in fields})
    return {bool: True, int: 3, float: 0.25, str: name, bytes: b"\x00\xff"}[kind]


def _field(kind: type[msgspec.Struct], field: msgspec.structs.FieldInfo) -> Any:
    if issubclass(kind, Message) and field.name == "schema":
        return 1
    if issubclass(kind, Message) and field.name == "id":
        return f"{kind.tag()}:p:1"
    return _value(field.type, field.name)


def path_of(cls: type[Message]) -> Path:
    return FOLDER / f"{cls.tag()}.hex"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for members in classes().values():
        for member in members:
            if not path_of(member).exists():
                path_of(member).write_text(encode(golden(member)).hex() + "\n")
