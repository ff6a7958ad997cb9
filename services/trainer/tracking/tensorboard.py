"""Event files for TensorBoard, in ``tensorboard/`` of the pipeline's folder, written by tensorboardX:
TensorBoard itself brings a web server and forty times the code to write the same records.

Each process writes one file anew with all points that stand, and empties older ones: so no version is
there twice, whatever was trained again. The file begins with a mark that has a viewer which is open
forget what it read before. The trap: such a viewer never gets past a file that is gone, so one is
deleted only when the next process finds it empty.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary

from services.trainer.tracking.base import Point

FOLDER = "tensorboard"


class TensorBoard:
    """Of one pipeline."""

    name = "tensorboard"

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._writer: EventsWriter | None = None

    def begin(self, points: Sequence[Point]) -> None:
        """See `Tracker.begin`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.glob("*.tfevents.*"):
            if path.stat().st_size:
                os.truncate(path, 0)
            else:
                path.unlink()
        self._writer = EventsWriter(str(self._folder / "events"))
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        for point in points:
            self._writer.write_event(_event(point))
        self._writer.flush()

    def add(self, point: Point) -> None:
        """See `Tracker.add`. On disk at once: a trainer may be killed at any moment."""
        assert self._writer is not None
        self._writer.write_event(_event(point))
        self._writer.flush()

    def close(self) -> None:
        """See `Tracker.close`."""
        if self._writer is not None:
            self._writer.close()


def _event(point: Point) -> Event:
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
    return Event(wall_time=point.time_s, step=point.version, summary=Summary(value=values))
