"""Where the ranks of one gang meet, and how they part: a folder of the run, one per gang epoch.

The learner calls it, in its thread. Ranks live on one machine. What needs no tensors goes through files
here rather than through a collective: a rank that looks at a file now and then hears of its own stop.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FOLDER = "gang"
POLL_S = 0.02
STOP_TIMEOUT_S = 1.5
"""For the others to come to their end too; leaves the rest of the 3 s of a stop to the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """One gang's folder, seen from one of its ranks."""

    run_folder: Path
    gang_epoch: int
    rank: int
    num_ranks: int

    @property
    def folder(self) -> Path:
        """Its own, since gang epochs rise."""
        return self.run_folder / FOLDER / f"e{self.gang_epoch}"

    @property
    def file(self) -> Path:
        """The one over which the process groups find each other."""
        return self.folder / "meeting"

    def open(self) -> None:
        """Rank 0 is about to join. What earlier gangs left goes."""
        for old in (self.run_folder / FOLDER).glob("e*"):
            shutil.rmtree(old, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def wait(self, check_stop: Callable[[], None]) -> None:
        """Until rank 0 joins, which may warm up a model first: as long as that takes."""
        while not self.folder.exists():
            check_stop()
            time.sleep(POLL_S)

    def agree_to_stop(self, version: int, *, timeout_s: float = STOP_TIMEOUT_S) -> bool:
        """Whether all ranks stop, at one version: only then may they gather a last checkpoint. Each is
        past its last other collective when it says so, so none can be mistaken for another."""
        own = self._stop_file(self.rank)
        _write(own, str(version))
        others = [self._stop_file(rank) for rank in range(self.num_ranks)]
        deadline_s = time.monotonic() + timeout_s
        while not all(path.exists() for path in others):
            if time.monotonic() > deadline_s:
                own.unlink()
                return False
            time.sleep(POLL_S)
        try:
            return {path.read_text() for path in others} == {str(version)}
        except FileNotFoundError:  # one gave up meanwhile
            return False

    def _stop_file(self, rank: int) -> Path:
        return self.folder / f"stop{rank}"


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
