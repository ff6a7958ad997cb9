"""Which keys a pipeline file may hold, and the one-line complaint about those it may not.

Called by `config_file` before msgspec decodes the tables: msgspec stops an unknown key too, but can't
say which valid key was meant. Walks the same types (`msgspec.inspect`), so nothing is listed twice.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec.inspect
from msgspec.inspect import Field, LiteralType, StructType, Type, UnionType

from jigsawrl.cli.errors import ConfigError
from jigsawrl.config import PipelineConfig

MIN_LIKENESS = 0.6
"""Below this a suggestion is noise: difflib's own default cutoff."""

LEAF_WEIGHT = 0.7
"""People misspell the key more often than its table, so the last part counts most."""

MAX_INTEGER = 2**63 - 1
"""TOML's integers are 64-bit, and so is the wire."""


class Tables(NamedTuple):
    """What a value may be when it is a table."""

    options: tuple[StructType, ...]

    @property
    def tag_field(self) -> str | None:
        """The key that chooses, where there is a choice."""
        return self.options[0].tag_field

    def chosen(self, value: object) -> StructType | None:
        """The option that a table's tag names; the only one needs no tag."""
        tag = value.get(self.tag_field) if isinstance(value, dict) and self.tag_field else None
        if tag is None and len(self.options) == 1:
            return self.options[0]
        return next((option for option in self.options if option.tag == tag), None)


def pipeline_type() -> StructType:
    """The root of the walk."""
    root = msgspec.inspect.type_info(PipelineConfig)
    assert isinstance(root, StructType)
    return root


def check_keys(data: dict[str, Any]) -> None:
    """Raise `ConfigError` for the first unknown key, unknown tag or number that no key can hold."""
    root = pipeline_type()
    _check_table(data, root, (root,), path="", valid=sorted(_paths(root, data, "")))


def _check_table(
    data: dict[str, Any],
    chosen: StructType,
    options: tuple[StructType, ...],
    *,
    path: str,
    valid: list[str],
) -> None:
    fields = {field.encode_name: field for field in chosen.fields}
    for key, value in data.items():
        where = _join(path, key)
        if key == chosen.tag_field:
            continue
        if key not in fields:
            raise ConfigError(_unknown_key(where, key, chosen, options, valid))
        _check_value(value, fields[key], path=where, valid=valid)


def _check_value(value: Any, field: Field, *, path: str, valid: list[str]) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: {value} is no finite number")
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise ConfigError(f"{path}: {value} does not fit 64 bits")
    tables = _tables(field.type)
    if tables is None or not isinstance(value, dict):
        return
    chosen = tables.chosen(value)
    if chosen is None:
        raise ConfigError(_wrong_tag(value, tables, path))
    _check_table(value, chosen, tables.options, path=path, valid=valid)


def _unknown_key(
    where: str,
    key: str,
    chosen: StructType,
    options: tuple[StructType, ...],
    valid: list[str],
) -> str:
    others = [
        json.dumps(option.tag)
        for option in options
        if option is not chosen and key in {field.encode_name for field in option.fields}
    ]
    if others:
        return (
            f"{where}: no effect with {chosen.tag_field} = {json.dumps(chosen.tag)};"
            f" it belongs to {chosen.tag_field} = {' or '.join(others)}"
        )
    nearest = max(valid, key=lambda candidate: _likeness(where, candidate))
    if _likeness(where, nearest) >= MIN_LIKENESS:
        return f"{where}: unknown key; did you mean {nearest}?"
    return f"{where}: unknown key; valid here: {', '.join(f.encode_name for f in chosen.fields)}"


def _wrong_tag(value: dict[str, Any], tables: Tables, path: str) -> str:
    where = _join(path, str(tables.tag_field))
    tags = [str(option.tag) for option in tables.options]
    listed = ", ".join(json.dumps(tag) for tag in tags)
    tag = value.get(str(tables.tag_field))
    if tag is None:
        return f"{where}: missing; one of {listed}"
    near = difflib.get_close_matches(str(tag), tags, n=1)
    hint = f"; did you mean {json.dumps(near[0])}?" if near else f"; one of {listed}"
    return f"{where}: unknown value {tag!r}{hint}"


def _likeness(path: str, candidate: str) -> float:
    leaf, candidate_leaf = path.rpartition(".")[2], candidate.rpartition(".")[2]
    return (
        LEAF_WEIGHT * difflib.SequenceMatcher(None, leaf, candidate_leaf).ratio()
        + (1 - LEAF_WEIGHT) * difflib.SequenceMatcher(None, path, candidate).ratio()
    )


def _paths(table: StructType, data: object, path: str) -> Iterator[str]:
    """All key paths that could be written, given the tags that were."""
    if table.tag_field is not None:
        yield _join(path, table.tag_field)
    for field in table.fields:
        where = _join(path, field.encode_name)
        yield where
        tables = _tables(field.type)
        if tables is None:
            continue
        value = data.get(field.encode_name) if isinstance(data, dict) else None
        chosen = tables.chosen(value) if value is not None else _default(field, tables)
        for option in tables.options if chosen is None else (chosen,):
            yield from _paths(option, value, where)


def _default(field: Field, tables: Tables) -> StructType | None:
    return next((option for option in tables.options if type(field.default) is option.cls), None)


def _tables(kind: Type) -> Tables | None:
    """The struct or structs that a field's type allows; None where it is no table."""
    members = kind.types if isinstance(kind, UnionType) else (kind,)
    options = tuple(member for member in members if isinstance(member, StructType))
    return Tables(options) if options else None


def literals_at(path: str, data: dict[str, Any]) -> tuple[object, ...]:
    """The allowed values of the key at `path`; empty where it takes any of its type."""
    table: StructType | None = pipeline_type()
    value: Any = data
    *parents, leaf = path.split(".")
    for name in parents:
        field = _field(table, name)
        tables = None if field is None else _tables(field.type)
        value = value.get(name) if isinstance(value, dict) else None
        table = None if tables is None else tables.chosen(value)
    found = _field(table, leaf)
    if found is None:
        return ()
    members = found.type.types if isinstance(found.type, UnionType) else (found.type,)
    return tuple(v for member in members if isinstance(member, LiteralType) for v in member.values)


def _field(table: StructType | None, name: str) -> Field | None:
    fields = () if table is None else table.fields
    return next((field for field in fields if field.encode_name == name), None)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
