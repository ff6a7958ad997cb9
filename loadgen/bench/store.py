"""``python -m loadgen.bench.store [--json] [--folder DIR]``: the price of losing nothing.

Events stored per second on the embedded nats-server, once with its own two minutes between two syncs
of the store to the disk (a machine that loses its power loses what was acknowledged since), once synced
before each acknowledgement. One event at a time, as a leader's tick waits for its own, and many at
once, as a busy cluster stores them. The two settings alternate, so that a busy machine slows both
alike. It measures the disk under ``--folder``: a store in memory (tmpfs) costs nothing and keeps
nothing.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.bus.server import start_server
from jigsawrl.contract.events import Heartbeat
from jigsawrl.contract.message import Worker
from loadgen.bench.output import Say, parser_of, say_of

SYNC_INTERVALS = {"2 minutes": None, "always": "always"}
WINDOWS = (1, 64)
"""Events on their way at once."""

NUM_ROUNDS = 3
ROUND_S = 2.0
"""Long enough that one slow sync of a shared disk does not decide it."""


class Row(NamedTuple):
    """The median of the rounds."""

    sync_interval: str
    num_at_once: int
    events_per_s: float


async def measure(folder: Path, sync_interval: str | None, num_at_once: int) -> float:
    """Events per second, on a new store."""
    server = await start_server(folder, sync_interval=sync_interval)
    try:
        bus = await connect(server.url, name="bench")
        await bus.create_streams([bus.subjects.events_stream()])
        await _store(bus, num_at_once, 0.3, name="warm")
        rate = await _store(bus, num_at_once, ROUND_S, name="n")
        await bus.close()
        return rate
    finally:
        server.stop()


async def _store(bus: NatsBus, num_at_once: int, duration_s: float, *, name: str) -> float:
    started_s = time.perf_counter()
    num_stored = 0

    async def publish(lane: int) -> None:
        nonlocal num_stored
        node, number = Worker(id=f"{name}{lane}", boot="b"), 0
        while time.perf_counter() - started_s < duration_s:
            await bus.publish_event(Heartbeat(id=f"heartbeat:{name}:{lane}:{number}", node=node))
            number += 1
            num_stored += 1

    await asyncio.gather(*(publish(lane) for lane in range(num_at_once)))
    return num_stored / (time.perf_counter() - started_s)


async def bench_all(folder: Path | None, say: Say) -> list[Row]:
    """All rows, and what the second setting costs against the first."""
    rows = []
    for num_at_once in WINDOWS:
        rates: dict[str, list[float]] = {name: [] for name in SYNC_INTERVALS}
        for _ in range(NUM_ROUNDS):
            for name, sync_interval in SYNC_INTERVALS.items():
                with tempfile.TemporaryDirectory(prefix="jigsaw-store-", dir=folder) as store:
                    rates[name].append(await measure(Path(store), sync_interval, num_at_once))
        for name, measured in rates.items():
            rows.append(Row(name, num_at_once, round(statistics.median(measured), 1)))
            say(f"sync {name:9}  {num_at_once:3} at once  {rows[-1].events_per_s:9.1f} events/s")
    return rows


def main() -> None:
    """The table, and one JSON object."""
    parser = parser_of("store", __doc__)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    options = parser.parse_args()
    rows = asyncio.run(bench_all(options.folder, say_of(options)))
    costs = {
        str(num_at_once): round(late.events_per_s / now.events_per_s, 2)
        for num_at_once in WINDOWS
        for late, now in [[row for row in rows if row.num_at_once == num_at_once]]
    }
    print(json.dumps({"slower_by": costs, "rows": [row._asdict() for row in rows]}))


if __name__ == "__main__":
    main()
