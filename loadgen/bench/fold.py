"""``python -m loadgen.bench.fold``: what one event costs the scheduler, in microseconds.

Folds the events of synchronous steps over many groups, as a rollout worker coalesces them (eight
sequences an event), with ticks between; the decision passes they lead to are counted in. The target
is under 100 us an event.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

from jigsawrl.contract import commands, events, parts
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Worker
from jigsawrl.contract.spec import Device, PipelineSpec
from jigsawrl.core.scheduler import Scheduler
from loadgen.bench.answers import Answers

NODE = Worker(id="node", boot="n")
LIST_SIZE = 8
EVENT_S = 0.002
"""Stream time between two events."""


class Bench:
    """One pipeline, answered at once."""

    def __init__(self, *, num_steps: int, groups_per_batch: int, group_size: int) -> None:
        self._scheduler = Scheduler()
        self._answers = Answers()
        self._sequence = 0
        self._pending: list[Event] = []
        self.total_s = 0.0
        self.num_events = 0
        self.spec = PipelineSpec(
            name="p",
            mode="sync",
            seed=0,
            num_steps=num_steps,
            groups_per_batch=groups_per_batch,
            group_size=group_size,
            min_group_size=2,
            num_rollout_workers=4,
            evaluation=None,
        )

    def run(self) -> None:
        """All steps."""
        devices = (Device("node", 0, "cpu", 1),)
        submitted = events.PipelineSubmitted(id="s", pipeline="p", spec=self.spec, config=b"")
        self._fold(events.NodeStarted(id="n", node=NODE, devices=devices))
        self._fold(submitted)
        while self._scheduler.state.pipelines["p"].stage != "finished":
            if self._pending:
                self._fold(self._pending.pop(0))
            else:
                self._fold(events.Heartbeat(id="h", node=NODE))
                self._fold(events.Tick(id="t"))

    def _fold(self, event: Event) -> None:
        self._sequence += 1
        started_s = time.perf_counter()
        issued = self._scheduler.handle(
            event, timestamp_s=self._sequence * EVENT_S, sequence=self._sequence
        )
        self.total_s += time.perf_counter() - started_s
        self.num_events += 1
        for command in issued:
            self._pending.extend(self._answer(command))

    def _answer(self, command: commands.Command) -> Iterator[Event]:
        answers = self._answers
        if isinstance(command, commands.StartTenant):
            yield answers.started(command, node=NODE.id)
        elif isinstance(command, commands.Configure):
            role = self._scheduler.state.pipelines["p"].tenants[command.worker.id].role
            yield answers.ready(command, role=role)
        elif isinstance(command, commands.PublishWeights):
            yield answers.published(command, version=command.version)
        elif isinstance(command, commands.LoadWeights):
            yield answers.loaded(command)
        elif isinstance(command, commands.MakeGroups):
            yield from answers.made(command, size=1)
        elif isinstance(command, commands.PlaceSequences):
            yield from self._generated(command)
        elif isinstance(command, commands.ScoreSequences):
            yield from answers.rewarded(command, size=LIST_SIZE)
        elif isinstance(command, commands.BatchCut):
            yield answers.published(command, version=command.version + 1)
            yield answers.checkpointed(command)

    def _generated(self, command: commands.PlaceSequences) -> Iterator[Event]:
        yield self._answers.accepted(command)
        version = command.placements[0].min_version
        ended = [(parts.Held(p.sequence, p.epoch), 9, version) for p in command.placements]
        for start in range(0, len(ended), LIST_SIZE):
            yield self._answers.finished(command.worker, ended[start : start + LIST_SIZE])


def main() -> None:
    """Print the cost."""
    bench = Bench(num_steps=10, groups_per_batch=256, group_size=8)
    bench.run()
    cost_us = bench.total_s / bench.num_events * 1e6
    json.dump({"num_events": bench.num_events, "us_per_event": round(cost_us, 1)}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
