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
from jigsawrl.contract.message import Ref, Role, Worker
from jigsawrl.contract.spec import Device, PipelineSpec
from jigsawrl.core.scheduler import Scheduler

NODE = Worker(id="node", boot="n")
LIST_SIZE = 8
EVENT_S = 0.002
"""Stream time between two events."""


class Bench:
    """One pipeline, answered at once."""

    def __init__(self, *, num_steps: int, groups_per_batch: int, group_size: int) -> None:
        self._scheduler = Scheduler()
        self._sequence = 0
        self._data = 0
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
            self._pending.extend(self._answers(command))

    def _ref(self) -> Ref:
        self._data += 1
        return Ref("D", self._data)

    def _answers(self, command: commands.Command) -> Iterator[Event]:
        worker = command.worker
        if isinstance(command, commands.StartTenant):
            yield _started(command.tenant, command.role)
        elif isinstance(command, commands.Configure):
            role = self._scheduler.state.pipelines["p"].tenants[worker.id].role
            gang = command.gang_epoch if role == "trainer" else None
            yield events.WorkerReady(
                id="r", pipeline="p", worker=worker, role=role, version=0, gang_epoch=gang
            )
        elif isinstance(command, commands.PublishWeights):
            yield self._published(worker, command.gang_epoch, command.version)
        elif isinstance(command, commands.LoadWeights):
            yield events.WeightsLoaded(
                id="l", pipeline="p", worker=worker, incarnation=0, version=command.version
            )
        elif isinstance(command, commands.MakeGroups):
            for order in command.orders:
                made = parts.GroupMade(
                    group=order.group, epoch=order.epoch, ref=self._ref(), num_prompt_tokens=9
                )
                yield events.GroupsMade(id="m", pipeline="p", worker=worker, made=(made,))
        elif isinstance(command, commands.PlaceSequences):
            yield from self._generated(worker, command)
        elif isinstance(command, commands.ScoreSequences):
            for start in range(0, len(command.orders), LIST_SIZE):
                rewarded = tuple(
                    parts.SequenceReward(
                        sequence=o.sequence, epoch=o.epoch, ref=self._ref(), reward=1.0
                    )
                    for o in command.orders[start : start + LIST_SIZE]
                )
                yield events.SequencesRewarded(
                    id="w", pipeline="p", worker=worker, rewarded=rewarded
                )
        elif isinstance(command, commands.BatchCut):
            yield self._published(worker, command.gang_epoch, command.version + 1)
            yield events.CheckpointCommitted(
                id="c",
                pipeline="p",
                worker=worker,
                gang_epoch=command.gang_epoch,
                incarnation=0,
                version=command.version + 1,
                path="",
            )

    def _generated(self, worker: Worker, command: commands.PlaceSequences) -> Iterator[Event]:
        held = tuple(parts.Held(p.sequence, p.epoch) for p in command.placements)
        yield events.SequencesAccepted(id="a", pipeline="p", worker=worker, accepted=held)
        for start in range(0, len(held), LIST_SIZE):
            finished = tuple(
                parts.SequenceFinish(
                    sequence=entry.sequence,
                    epoch=entry.epoch,
                    ref=self._ref(),
                    finish_reason="stop",
                    num_tokens=9,
                    min_version=command.placements[0].min_version,
                    max_version=command.placements[0].min_version,
                )
                for entry in held[start : start + LIST_SIZE]
            )
            yield events.SequencesFinished(id="f", pipeline="p", worker=worker, finished=finished)

    def _published(self, worker: Worker, gang_epoch: int, version: int) -> Event:
        return events.VersionPublished(
            id="v",
            pipeline="p",
            worker=worker,
            gang_epoch=gang_epoch,
            incarnation=0,
            version=version,
            manifest=self._ref(),
            num_bytes=1,
            num_trained_tokens=1,
            metrics={},
        )


def _started(tenant: str, role: Role) -> Event:
    worker = Worker(id=tenant, boot="b")
    return events.WorkerStarted(
        id="s", pipeline="p", worker=worker, role=role, node="node", device=None
    )


def main() -> None:
    """Print the cost."""
    bench = Bench(num_steps=10, groups_per_batch=256, group_size=8)
    bench.run()
    cost_us = bench.total_s / bench.num_events * 1e6
    json.dump({"num_events": bench.num_events, "us_per_event": round(cost_us, 1)}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
