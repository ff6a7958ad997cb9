"""The page on configuration names every key there is, and the first look is a valid pipeline."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from msgspec.inspect import StructType, UnionType

from jigsawrl.cli.config_file import load_config
from jigsawrl.cli.config_keys import pipeline_type

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "config.md"


def keys(table: StructType) -> set[str]:
    found = set()
    for field in table.fields:
        members = field.type.types if isinstance(field.type, UnionType) else (field.type,)
        tables = [member for member in members if isinstance(member, StructType)]
        for option in tables:
            found |= keys(option)
        if not tables:
            found.add(field.encode_name)
    return found


def test_every_key_is_explained_and_no_other() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    cells = [re.findall(r"`([\w.]+)`", row.split("|")[1]) for row in rows]
    named = {path.rpartition(".")[2] for cell in cells for path in cell} - {"type"}
    assert named | {"path"} == keys(pipeline_type())


def test_the_pipeline_in_the_readme_is_valid_and_says_what_the_example_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
    path = tmp_path / "readme.toml"
    path.write_text(text)
    assert load_config(path).name == "sort-digits"
    example = flat(tomllib.loads((ROOT / "examples" / "sort-digits.toml").read_text()))
    assert flat(tomllib.loads(text)).items() <= example.items(), "who copies it gets what learns"


def flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= (
            flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        )
    return found


def test_a_node_of_several_servers_has_a_name_of_its_own() -> None:
    """`python -m services.node` without --node is node0 on each machine, and the second is refused."""
    commands = re.findall(
        r"^(?:python -m services\.|jigsaw )node .*:4222,.*$",
        (ROOT / "docs" / "security.md").read_text(),
        re.MULTILINE,
    )
    assert commands
    assert all(command.startswith("jigsaw node ") or "--node" in command for command in commands)
