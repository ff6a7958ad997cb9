"""Scenarios: several pipelines of fixed work, from a file, and others drawn around it from a seed.

Called by `multiplex`. A scenario becomes pipeline files that anyone can run with `jigsaw run`.
"""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from jigsawrl.cli.config_file import to_toml
from jigsawrl.config import PipelineConfig

MULTIPLEX = Path(__file__).parent.parent / "scenarios" / "multiplex.toml"

Table = dict[str, Any]


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of them."""

    num_steps: int
    """Versions that every pipeline trains."""
    common: Table
    """Of every pipeline's config; its own keys go before these."""
    pipelines: dict[str, Table]


def load(path: Path) -> Scenario:
    """Raises ValueError, with the path, where it is none."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path} is no scenario: {error}") from None


def configs(scenario: Scenario, *, num_pipelines: int, seed: int) -> list[PipelineConfig]:
    """Of its first pipelines. `seed` moves that of each, and with it prompts and all lengths."""
    if num_pipelines > len(scenario.pipelines):
        raise ValueError(f"the scenario has {len(scenario.pipelines)} pipelines only")
    made = []
    for name, own in list(scenario.pipelines.items())[:num_pipelines]:
        table = merged(scenario.common, own)
        table["name"] = name
        table["seed"] = table.get("seed", 0) + 100 * seed
        table = merged(table, {"trainer": {"num_steps": scenario.num_steps}})
        try:
            made.append(msgspec.convert(table, PipelineConfig))
        except msgspec.ValidationError as error:
            raise ValueError(f"pipeline {name} of the scenario: {error}") from None
    return made


def varied(scenario: Scenario, *, seed: int) -> Scenario:
    """Another one around it: the law of lengths, the batch and the environment's delay of each
    pipeline, each within a factor of about 1.5."""
    draw = Random(seed)
    pipelines = {}
    for name, own in scenario.pipelines.items():
        whole = merged(scenario.common, own)
        engine = whole["rollout"]["engine"]
        lengths = engine["drawn_lengths"]
        lengths["median_tokens"] = round(lengths["median_tokens"] * draw.uniform(0.67, 1.5))
        lengths["p95_tokens"] = round(lengths["p95_tokens"] * draw.uniform(0.67, 1.5))
        for key, least in (("median_tokens", 1), ("p95_tokens", lengths["median_tokens"])):
            lengths[key] = min(max(lengths[key], least), lengths["max_tokens"])
        batch = whole["trainer"]["groups_per_batch"]
        whole["trainer"]["groups_per_batch"] = max(1, round(batch * draw.uniform(0.67, 1.5)))
        if "turn_delay_s" in whole["task"]:
            delay_s = whole["task"]["turn_delay_s"] * draw.uniform(0.67, 1.5)
            whole["task"]["turn_delay_s"] = round(delay_s, 3)
        pipelines[name] = whole
    return msgspec.structs.replace(scenario, common={}, pipelines=pipelines)


def write(pipelines: list[PipelineConfig], folder: Path) -> list[Path]:
    """One file each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for config in pipelines:
        paths.append(folder / f"{config.name}.toml")
        paths[-1].write_text(to_toml(config))
    return paths


def merged(below: Table, above: Table) -> Table:
    """Tables in tables joined key by key; `above` wins."""
    table = copy.deepcopy(below)
    for key, value in above.items():
        inner = table.get(key)
        if isinstance(inner, dict) and isinstance(value, dict):
            table[key] = merged(inner, value)
        else:
            table[key] = copy.deepcopy(value)
    return table
