"""The programs of the system, which the command starts by name and never imports."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

from jigsawrl.cli.errors import CommandError


def require_programs(package: str) -> None:
    """Raise `CommandError` where the package of programs is not there (a bare wheel)."""
    if importlib.util.find_spec(package) is None:
        raise CommandError(
            f"the programs ({package}) are not installed: this is the bare library;"
            " the system runs from a checkout (make run) or the image"
        )


def start_program(module: str, *arguments: str) -> int:
    """Run one program to its end with our terminal; its exit status."""
    return subprocess.run([sys.executable, "-m", module, *arguments], check=False).returncode
