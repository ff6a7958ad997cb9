"""The rollout workers of the simulated world: a token every 100 ms, records, moves."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Ref, SubStageKind

if TYPE_CHECKING:
    from tests.unit.core.tenants import Process
    from tests.unit.core.world import World

TOKEN_S = 0.1


class Made(msgspec.Struct, frozen=True):
    """What a stored record says of a sequence."""

    sequence: str
    num_tokens: int
    versions: tuple[int, ...]
    """Oldest and newest of its tokens; empty where there are none."""


class Part(msgspec.Struct, frozen=True):
    """What one owner generates of a sequence."""

    sequence: str
    epoch: int
    start: Made
    since_s: float
    """On the clock of its owner (`World.worked_s`)."""
    version: int

    def made(self, worked_s: float, version: int) -> Made:
        """What there is by now."""
        num_new = int((worked_s - self.since_s) / TOKEN_S + 1e-6)  # sums of small steps
        num = min(self.start.num_tokens + num_new, num_tokens_of(self.sequence))
        versions = [*self.start.versions, self.version, version]
        known = (min(versions), max(versions)) if num_new else self.start.versions
        return Made(self.sequence, num, known)


def num_tokens_of(sequence: str) -> int:
    """Whoever generates it: mostly short, a few are long."""
    random = Random(f"length of {sequence}")
    return random.randint(40, 80) if random.random() < 0.1 else random.randint(1, 20)


class RolloutTenants:
    """Carries out the commands of rollout workers."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _head(self, process: Process, tag: str) -> dict[str, object]:
        return {
            "id": self._world.new_id(tag),
            "pipeline": process.order.pipeline,
            "worker": process.worker,
        }

    def _on_loadweights(self, process: Process, command: c.LoadWeights) -> None:
        def load() -> None:
            process.weights = (command.incarnation, command.version)
            event = e.WeightsLoaded(
                **self._head(process, "loaded"),
                incarnation=command.incarnation,
                version=command.version,
            )
            self._world.say(process, event)

        self._world.later(0.05, load)

    def _on_placesequences(self, process: Process, command: c.PlaceSequences) -> None:
        accepted = []
        for placement in command.placements:
            name, epoch = placement.sequence, placement.epoch
            start = self._check(process, command.incarnation, placement)
            since_s = self._world.worked_s(process)
            part = Part(name, epoch, start, since_s, process.weights[1])
            process.held[name] = epoch
            process.parts[name] = part
            accepted.append(parts.Held(name, epoch))
            rest_s = (num_tokens_of(name) - start.num_tokens) * TOKEN_S
            self._world.work(
                process,
                rest_s,
                lambda part=part: self._finish(process, part),
                wanted=lambda part=part: process.parts.get(part.sequence) is part,
            )
        event = e.SequencesAccepted(**self._head(process, "accepted"), accepted=tuple(accepted))
        self._world.say(process, event)

    def _check(self, process: Process, incarnation: int, placement: c.Placement) -> Made:
        """A placement that a worker can take: where it begins."""
        spec = self._world.scheduler.state.pipelines[process.order.pipeline].spec
        name = placement.sequence
        assert process.weights[0] == incarnation
        assert 0 <= process.weights[1] - placement.min_version <= spec.max_staleness
        others = [p for p in self._world.processes.values() if p.alive and p is not process]
        assert all(p.held.get(name) != placement.epoch for p in others), f"{name} has two owners"
        if placement.resume is None:
            return Made(name, 0, ())
        start = self._world.records[placement.resume]
        assert start.sequence == name
        assert max(start.versions) <= process.weights[1], "the target has the record's last version"
        return start

    def _made(self, process: Process, part: Part) -> Made:
        return part.made(self._world.worked_s(process), process.weights[1])

    def _store(self, made: Made) -> Ref:
        ref = self._world.new_ref()
        self._world.records[ref] = made
        return ref

    def _finish(self, process: Process, part: Part) -> None:
        name, epoch = part.sequence, part.epoch
        if process.parts.get(name) is not part or process.held.get(name) != epoch:
            return
        if process.alive:
            del process.parts[name]
            process.ending.add((name, epoch))
            self._world.num_made[name] += num_tokens_of(name) - part.start.num_tokens
            self._world.later(0.02, lambda: self._tell_end(process, part))

    def _tell_end(self, process: Process, part: Part) -> None:
        name, epoch = part.sequence, part.epoch
        process.ending.discard((name, epoch))
        if process.held.get(name) == epoch:
            del process.held[name]
        failed: tuple[parts.SequenceFailure, ...] = ()
        finished: tuple[parts.SequenceFinish, ...] = ()
        if self._world.chance(self._world.faults.fail_work):
            failed = (parts.SequenceFailure(sequence=name, epoch=epoch, reason="no"),)
        else:
            made = self._made(process, part)
            finish = parts.SequenceFinish(
                sequence=name,
                epoch=epoch,
                ref=self._store(made),
                finish_reason="stop",
                num_tokens=made.num_tokens,
                min_version=min(made.versions),
                max_version=max(made.versions),
            )
            finished = (finish,)
        event = e.SequencesFinished(
            **self._head(process, "finished"), finished=finished, failed=failed
        )
        self._world.say(process, event)
        kinds = ("prefill", "bulk_decode") if len(process.held) > 8 else ("tail_decode",)
        self._worked(process, *kinds, version=process.weights[1], num_tokens=20)

    def _worked(
        self, process: Process, *kinds: SubStageKind, version: int, num_tokens: int
    ) -> None:
        """Tell of 50 ms of each kind."""
        now_s = self._world.now_s
        spans = tuple(
            parts.SubStage(
                kind=kind,
                version=max(version, 0),
                started_s=now_s - 0.05,
                ended_s=now_s,
                duration_s=0.05,
                num_iterations=5,
                num_tokens=num_tokens,
            )
            for kind in kinds
        )
        self._world.say(process, e.SubStagesEnded(**self._head(process, "spans"), spans=spans))

    def _on_drop(self, process: Process, command: c.Drop) -> None:
        for name, epoch in command.sequences:
            if process.held.get(name, epoch + 1) <= epoch:
                del process.held[name]
                process.parts.pop(name, None)

    def _on_migratesequences(self, process: Process, command: c.MigrateSequences) -> None:
        """Stops at once; answers when it is stored; holds until that is acked."""
        exports, finished, not_held = [], [], []
        for name, epoch in command.sequences:
            part = process.parts.get(name)
            if part is not None and process.held.get(name) == part.epoch == epoch:
                del process.parts[name]
                exports.append((part, self._made(process, part)))
            elif (name, epoch) in process.ending:
                finished.append(parts.Held(name, epoch))
            else:
                not_held.append(parts.Held(name, epoch))

        def tell() -> None:
            exported = tuple(self._export(process, part, made) for part, made in exports)
            event = e.SequencesExported(
                **self._head(process, "exported"),
                exported=exported,
                finished=tuple(finished),
                not_held=tuple(not_held),
            )
            self._world.say(process, event)
            for one in exported:
                if process.held.get(one.sequence) == one.epoch:
                    del process.held[one.sequence]

        self._world.later(self._world.random.uniform(0.001, 0.1), tell)

    def _export(self, process: Process, part: Part, made: Made) -> parts.SequenceExport:
        num_new = made.num_tokens - part.start.num_tokens
        self._world.num_made[part.sequence] += num_new
        return parts.SequenceExport(
            sequence=part.sequence,
            epoch=part.epoch,
            ref=self._store(made) if num_new else None,
            num_tokens=made.num_tokens,
            min_version=min(made.versions, default=None),
            max_version=max(made.versions, default=None),
        )

    def tell_progress(self, process: Process) -> None:
        """Partial records of what has grown."""
        made = [self._made(process, part) for part in process.parts.values()]
        progress = tuple(
            parts.SequenceProgress(
                sequence=part.sequence,
                epoch=part.epoch,
                ref=self._store(now),
                num_tokens=now.num_tokens,
            )
            for part, now in zip(process.parts.values(), made, strict=True)
            if now.num_tokens > part.start.num_tokens
        )
        if progress:
            event = e.SequencesProgressed(**self._head(process, "progressed"), progress=progress)
            self._world.say(process, event)
