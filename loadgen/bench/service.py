"""``python -m loadgen.bench.service [--json] [--rounds N]``: how long a service's users wait.

Each round is a daemon with two nodes of its own on this machine, and a small model that trains from
nothing. Measured are the cores that an idle daemon takes; the time from ``jigsaw submit`` to the first
answer that was generated (the first token is a few of the model's steps before it); from the SIGKILL
of the node that trains to the next version that is trained elsewhere, with the silence after which a
node counts as lost in it; and from the SIGKILL of the scheduler to the next version behind the next
election. Times of messages are those of their arrival here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from jigsawrl.bus.client import NatsBus, connect
from jigsawrl.contract.events import LeaderElected, SequencesFinished, VersionPublished
from loadgen.bench.output import Say, parser_of, say_of

PIPELINE = """
name = "bench"
[model]
type = "init"
[task]
type = "sort-digits"
[rollout]
num_workers = 2
[evaluation]
enabled = false
[trainer]
num_steps = 100000
"""

IDLE_S = 20.0
WAIT_S = 180.0
NUM_VERSIONS = 3
"""Trained before anything is killed."""


class Waits(NamedTuple):
    """Of one round."""

    idle_cores: float
    submit_to_first_answer_s: float
    node_killed_to_next_version_s: float
    scheduler_killed_to_next_version_s: float


class Service:
    """A daemon without devices and two nodes, for the length of a block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Service:
        self.jigsaw("up", "--detach", "--devices", "none")
        self.url: str = json.loads((self._folder / "daemon.json").read_text())["url"]
        self.daemon = psutil.Process(json.loads((self._folder / "daemon.json").read_text())["pid"])
        for name in ("a", "b"):
            command = [sys.executable, "-m", "jigsawrl.cli.main", "node", "--devices", "cpu"]
            command += ["--url", self.url, "--folder", str(self._folder), "--name", name]
            with (self._folder / "logs" / f"node-{name}.log").open("wb") as log:
                self._nodes[name] = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes.values():
            node.kill()
            node.wait()
        self.jigsaw("down")

    def jigsaw(self, *arguments: str) -> str:
        """Standard output of a command."""
        done = subprocess.run(
            [sys.executable, "-m", "jigsawrl.cli.main", *arguments, "--folder", str(self._folder)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        return done.stdout

    def idle_cores(self) -> float:
        """That the daemon takes, with nats-server and scheduler, while nothing is there to do."""
        time.sleep(5.0)  # its start is over
        before_s = self._cpu_s()
        time.sleep(IDLE_S)
        return (self._cpu_s() - before_s) / IDLE_S

    def kill_trainer(self) -> None:
        """With the machine that it runs on, as far as the cluster can tell."""
        told: dict[str, Any] = json.loads(self.jigsaw("status", "bench", "--json"))
        devices = {worker["worker"]: worker["device"] for worker in told["workers"]}
        self._nodes[str(devices["bench.trainer0"]).partition("/")[0]].kill()

    def kill_scheduler(self) -> None:
        """Its supervisor starts it again."""
        for child in self.daemon.children():
            if "services.scheduler" in child.cmdline():
                os.kill(child.pid, signal.SIGKILL)

    def _cpu_s(self) -> float:
        family = [self.daemon, *self.daemon.children(recursive=True)]
        return sum(times.user + times.system for times in (one.cpu_times() for one in family))


async def _until(
    bus: NatsBus, condition: Callable[[Any], bool], *, after: int
) -> tuple[float, int]:
    """When an event came for which it is true, and its sequence."""
    async with asyncio.timeout(WAIT_S):
        async for stored in bus.read_events(after):
            if condition(stored.event):
                return time.perf_counter(), stored.sequence
    raise AssertionError("the bus was closed")


def _trained(event: Any) -> bool:
    return isinstance(event, VersionPublished) and event.num_trained_tokens > 0


async def measure(folder: Path) -> Waits:
    """One round."""
    with Service(folder) as service:
        idle_cores = service.idle_cores()
        pipeline = folder / "bench.toml"
        pipeline.write_text(PIPELINE)
        bus = await connect(service.url, name="bench")
        submitted_s = time.perf_counter()
        await asyncio.to_thread(service.jigsaw, "submit", str(pipeline))
        answered_s, last = await _until(bus, lambda e: isinstance(e, SequencesFinished), after=0)
        for _ in range(NUM_VERSIONS):
            _, last = await _until(bus, _trained, after=last)
        await asyncio.to_thread(service.kill_trainer)
        node_killed_s = time.perf_counter()
        # What the killed one had published comes before the kill, and is read behind it at the worst.
        last = await _newest(bus, last)
        trained_s, last = await _until(bus, _trained, after=last)
        service.kill_scheduler()
        scheduler_killed_s = time.perf_counter()
        last = await _newest(bus, last)
        _, last = await _until(bus, lambda e: isinstance(e, LeaderElected), after=last)
        led_s, _ = await _until(bus, _trained, after=last)
        await bus.close()
    return Waits(
        idle_cores,
        answered_s - submitted_s,
        trained_s - node_killed_s,
        led_s - scheduler_killed_s,
    )


async def _newest(bus: NatsBus, after: int) -> int:
    """Sequence of the last event that is stored now."""
    stream = bus.subjects.events_stream().name
    info = await bus.connection.call("look", lambda js: js.stream_info(stream))
    return max(after, int(info.state.last_seq))


def bench_all(num_rounds: int, say: Say) -> dict[str, float]:
    """The median of the rounds."""
    rounds = []
    for _ in range(num_rounds):
        with tempfile.TemporaryDirectory(prefix="jigsaw-service-") as folder:
            rounds.append(asyncio.run(measure(Path(folder))))
        say("  ".join(f"{name} {value:.3f}" for name, value in rounds[-1]._asdict().items()))
    columns = zip(*rounds, strict=True)
    return dict(zip(Waits._fields, (round(statistics.median(c), 3) for c in columns), strict=True))


def main() -> None:
    """A line per round, and one JSON object."""
    parser = parser_of("service", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(bench_all(options.rounds, say_of(options))))


if __name__ == "__main__":
    main()
