"""A pipeline file and its `--set` overrides to a resolved `PipelineConfig`, and back to text.

Called by `jigsaw check` and `jigsaw run`. Every complaint is a `ConfigError` of one line that starts
with the file and the key. What needs more than the tables themselves (files on disk, keys that
cancel each other) lies in `config_checks`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.cli.config_checks import check_files, inert_keys
from jigsawrl.cli.config_keys import check_keys, literals_at
from jigsawrl.cli.errors import CommandError, ConfigError
from jigsawrl.config import JsonlTaskConfig, PathModelConfig, PipelineConfig
from jigsawrl.config_algorithm import GRPOConfig

DEFAULT_ALGORITHM = GRPOConfig.__struct_config__.tag
"""So that ``--set algorithm.group_size=4`` works on a file that does not choose."""


def load_config(
    path: Path, *, overrides: Sequence[str] = (), trackers: Sequence[str] = ()
) -> PipelineConfig:
    """Read, override, check everything; relative paths become absolute, seen from the file's folder.
    `trackers` are switched on besides those that the file asks for.

    Example: ``load_config(Path("a.toml"), overrides=["trainer.num_steps=3"])``."""
    try:
        data = _read(path)
        for override in overrides:
            _apply(data, override)
        for tracker in trackers:
            _track(data, tracker)
        config = _decode(data)
        _refuse_inert(data, config)
        config = _with_absolute_paths(config, path.resolve().parent)
        check_files(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError("no such file; give the path of a pipeline TOML") from None
    except OSError as error:
        raise ConfigError(f"can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"no UTF-8 text at byte {error.start}; save it as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"no valid TOML: {error}") from None


def _apply(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {override}: write it as key=value, as in trainer.num_steps=3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    table = data
    for depth, name in enumerate(parts[:-1]):
        child = table.setdefault(name, {})
        if not isinstance(child, dict):
            raise ConfigError(f"--set {override}: {'.'.join(parts[: depth + 1])} is no table")
        table = child
    table[parts[-1]] = value


def _track(data: dict[str, Any], tracker: str) -> None:
    """What the file says of it stays."""
    table = data.setdefault("tracking", {})
    if isinstance(table, dict) and tracker == "tensorboard":
        table[tracker] = True
    elif isinstance(table, dict):
        table.setdefault(tracker, {})


def _decode(data: dict[str, Any]) -> PipelineConfig:
    algorithm = data.get("algorithm")
    if isinstance(algorithm, dict):
        algorithm.setdefault("type", DEFAULT_ALGORITHM)
    check_keys(data)
    try:
        return msgspec.convert(data, PipelineConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(_reword(str(error), data)) from None


def _reword(text: str, data: dict[str, Any]) -> str:
    """``Expected `int`, got `str` - at `$.trainer.num_steps``` with the path in front."""
    what, _, where = text.partition(" - at `$")
    path = where.strip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(\w+)`", what)
    if missing:
        return f"{path}.{missing[1]}: missing".lstrip(".")
    if what.startswith("Invalid enum value"):
        allowed = ", ".join(json.dumps(value) for value in literals_at(path, data))
        what = f"{what.removeprefix('Invalid enum value').strip()} is none of {allowed}"
    for table in ("`object`", "`object | null`"):
        what = what.replace(table, "a table")
    what = what.replace("Expected", "expected", 1)
    return f"{path}: {what}" if path else what


def _refuse_inert(data: dict[str, Any], config: PipelineConfig) -> None:
    for path, why in inert_keys(config).items():
        table: Any = data
        for name in path.split("."):
            table = table.get(name) if isinstance(table, dict) else None
        if table is not None:
            raise ConfigError(f"{path}: no effect {why}")


def _with_absolute_paths(config: PipelineConfig, folder: Path) -> PipelineConfig:
    replace = msgspec.structs.replace
    if isinstance(config.model, PathModelConfig):
        model = replace(config.model, path=str((folder / config.model.path).resolve()))
        config = replace(config, model=model)
    if isinstance(config.task, JsonlTaskConfig):
        task = replace(config.task, path=str((folder / config.task.path).resolve()))
        config = replace(config, task=task)
    return config


def to_json(config: PipelineConfig) -> str:
    """The whole resolved config, indented, nulls kept."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2).decode()


def from_json(payload: bytes) -> PipelineConfig:
    """What `to_json` wrote; raises ValueError."""
    return msgspec.json.decode(payload, type=PipelineConfig)


def to_toml(config: PipelineConfig) -> str:
    """The resolved config as a pipeline file that gives the same config again.

    TOML has no null: keys that are None are left out, and so are keys without effect."""
    try:
        import tomlkit
    except ImportError:
        raise CommandError(
            "tomlkit is missing: pip install 'jigsawrl[cli]', or use --json"
        ) from None
    data = msgspec.to_builtins(config)
    for path in inert_keys(config):
        *parents, leaf = path.split(".")
        table = data
        for name in parents:
            table = table[name]
        del table[leaf]
    return tomlkit.dumps(_ordered(data))


def _ordered(table: dict[str, Any]) -> dict[str, Any]:
    """Plain values before sub-tables, as TOML needs; None dropped."""
    plain = {k: v for k, v in table.items() if v is not None and not isinstance(v, dict)}
    return plain | {k: _ordered(v) for k, v in table.items() if isinstance(v, dict)}
