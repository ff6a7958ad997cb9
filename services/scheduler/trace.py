"""``python -m services.scheduler.trace STATE_DIR --to FILE``: a run as a picture, from its events.

Writes the Trace Event Format that Perfetto and chrome://tracing open: one process per device, one
thread per tenant, a slice per sub-stage, a counter of the shares of each device, and instants for
published versions and moved sequences. Slices are what workers report, half a second of work of one
kind at most; `busy_s` says how much of one was work.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from jigsawrl.contract.events import (
    Event,
    SequencesExported,
    SharesApplied,
    SubStagesEnded,
    VersionPublished,
    WorkerStarted,
)
from jigsawrl.contract.message import Worker
from services.scheduler.recorded import events_of

NO_DEVICE = "no device"
"""Where tenants that need none are shown."""


class Trace:
    """Grows event by event."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._devices: dict[str, int] = {}
        self._threads: dict[str, tuple[int, int]] = {}
        """Tenant -> (its device's number, its own)."""
        self._shares: dict[str, float] = {}

    def add(self, event: Event, *, timestamp_s: float) -> None:
        """One message of the event stream; those that show nothing are left out."""
        if isinstance(event, WorkerStarted):
            self._place(event.worker.id, event.device or NO_DEVICE)
        elif isinstance(event, SharesApplied):
            self._divide(event, timestamp_s)
        elif isinstance(event, SubStagesEnded):
            self._work(event)
        elif isinstance(event, VersionPublished):
            self._instant(event.worker, f"version {event.version}", timestamp_s)
        elif isinstance(event, SequencesExported):
            self._instant(event.worker, f"moved {len(event.exported)}", timestamp_s)

    def _place(self, tenant: str, device: str) -> int:
        number = self._devices.get(device)
        if number is None:
            number = self._devices[device] = len(self._devices) + 1
            self.events.append(_name("process_name", device, pid=number))
        if self._threads.get(tenant, (0, 0))[0] != number:
            self._threads[tenant] = (number, len(self._threads) + 1)
            self.events.append(_name("thread_name", tenant, pid=number, tid=len(self._threads)))
        return number

    def _divide(self, event: SharesApplied, timestamp_s: float) -> None:
        applied = {entry.tenant: entry.applied for entry in event.shares}
        self._shares |= applied
        for tenant in applied:
            self._place(tenant, event.device)
        if applied:
            pid = self._devices[event.device]
            counter = {"ph": "C", "name": "share", "pid": pid, "ts": timestamp_s * 1e6}
            self.events.append(counter | {"args": applied})

    def _work(self, event: SubStagesEnded) -> None:
        pid, tid = self._thread(event.worker)
        for span in event.spans:
            self.events.append(
                {
                    "ph": "X",
                    "name": span.kind,
                    "cat": event.pipeline,
                    "pid": pid,
                    "tid": tid,
                    "ts": span.started_s * 1e6,
                    "dur": max(0.0, span.ended_s - span.started_s) * 1e6,
                    "args": {
                        "version": span.version,
                        "busy_s": round(span.duration_s, 6),
                        "iterations": span.num_iterations,
                        "tokens": span.num_tokens,
                        "share": self._shares.get(event.worker.id, 1.0),
                    },
                }
            )

    def _instant(self, worker: Worker, name: str, timestamp_s: float) -> None:
        pid, tid = self._thread(worker)
        place = {"pid": pid, "tid": tid, "ts": timestamp_s * 1e6}
        self.events.append({"ph": "i", "s": "t", "name": name, **place})

    def _thread(self, worker: Worker) -> tuple[int, int]:
        if worker.id not in self._threads:
            self._place(worker.id, NO_DEVICE)
        return self._threads[worker.id]


def _name(kind: str, name: str, **place: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **place, "args": {"name": name}}


def trace(folder: Path) -> list[dict[str, Any]]:
    """Trace events of a scheduler's state folder; raises ValueError for a damaged one."""
    made = Trace()
    for event, timestamp_s, _ in events_of(folder):
        made.add(event, timestamp_s=timestamp_s)
    return made.events


def main() -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler.trace")
    parser.add_argument("folder", type=Path, metavar="STATE_DIR", help="RUN/scheduler of a run")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="trace.json")
    arguments = parser.parse_args()
    try:
        events = trace(arguments.folder)
        arguments.to.write_bytes(msgspec.json.encode({"traceEvents": events}))
    except (OSError, ValueError) as error:
        print(f"jigsaw trace: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
