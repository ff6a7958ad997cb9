"""Which view shows what goes on: a picture on a terminal, lines everywhere else."""

from __future__ import annotations

import sys

from jigsawrl.cli.errors import EXIT_BAD_INPUT, CommandError
from jigsawrl.cli.pipeline_client import View
from jigsawrl.cli.plain_view import PlainView


def build_view() -> View:
    """Raises `CommandError` where the terminal's library is missing."""
    if not sys.stdout.isatty():
        return PlainView(lambda line: print(line, flush=True))
    try:
        from jigsawrl.cli.live_view import LiveView
    except ImportError:
        raise CommandError(
            "rich is missing: pip install 'jigsawrl[cli]'", status=EXIT_BAD_INPUT
        ) from None
    return LiveView()
