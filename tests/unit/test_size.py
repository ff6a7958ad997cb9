"""The sizes that keep files readable (CONTRIBUTING.md)."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def sources() -> Iterator[Path]:
    for folder in ("shared", "services", "loadgen", "tests", "examples"):
        yield from (ROOT / folder).rglob("*.py")


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {lines}"
        for path in sources()
        if (lines := len(path.read_text().splitlines())) > MAX_FILE_LINES
    ]
    assert not long


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {lines}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long
