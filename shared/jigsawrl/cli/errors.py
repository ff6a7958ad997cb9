"""Errors that end the command with one line and an exit status."""

from __future__ import annotations

EXIT_FAILED = 1
"""The run failed, or ended without conservation."""

EXIT_BAD_INPUT = 2
"""Nothing was started; also argparse's status."""

EXIT_INTERRUPTED = 130
"""Ctrl-C, as shells count it: 128 plus SIGINT."""


class ConfigError(ValueError):
    """A pipeline file that can't be used; the text says which key, why, and what to do."""


class CommandError(Exception):
    """The command can't go on; the text is one line for people."""

    def __init__(self, text: str, *, status: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.status = status
