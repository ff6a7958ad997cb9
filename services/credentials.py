"""The option of every service that says who it is to the NATS server."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from jigsawrl.bus.credentials import ENVIRONMENT, Credentials, read_credentials


def add_credentials(parser: argparse.ArgumentParser) -> None:
    """``--credentials PATH``."""
    parser.add_argument(
        "--credentials",
        type=Path,
        metavar="PATH",
        default=os.environ.get(ENVIRONMENT) or None,
        help=f"by `jigsaw credentials`: the role's file or the group's folder; default: ${ENVIRONMENT}",
    )


def credentials_of(arguments: argparse.Namespace, role: str) -> Credentials | None:
    """None for a server that takes all who come. Raises `BusError`."""
    path: Path | None = arguments.credentials
    return None if path is None else read_credentials(path, role)
