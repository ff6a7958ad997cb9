"""What the benchmarks print: lines for people, and one JSON object as the last line."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Say = Callable[[str], None]
"""Prints a line for people, or drops it."""


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """Of ``python -m loadgen.bench.NAME``, with the option that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m loadgen.bench.{name}", description=description
    )
    parser.add_argument("--json", action="store_true", help="only the last line, one JSON object")
    return parser


def say_of(options: argparse.Namespace) -> Say:
    """What these options want of lines for people."""
    return (lambda text: None) if options.json else print
