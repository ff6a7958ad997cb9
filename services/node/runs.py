"""Whether nodes share the folder that their trainers write into: a file in it tells."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

ID_FILE = ".jigsaw-folder"


def folder_id(folder: Path) -> str:
    """The same for whoever sees the same folder, which is made if need be; raises `OSError`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ID_FILE
    if not path.exists():
        part = folder / f"{ID_FILE}.{uuid.uuid4().hex}"
        part.write_text(uuid.uuid4().hex)
        # The first of several nodes that come at once wins: a link is never made over another.
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(part)
        part.unlink()
    return path.read_text()
