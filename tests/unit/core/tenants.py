"""The tenants of the simulated world: what each answers to each command."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from jigsawrl.contract import commands as c
from jigsawrl.contract import events as e
from jigsawrl.contract import parts
from jigsawrl.contract.message import Ledger, Worker
from tests.unit.core.rollouts import Part, RolloutTenants

TRAIN_S = 0.5
"""Of a step, alone."""

NOT_FINITE = (float("nan"), float("inf"), float("-inf"))


class Process:
    """One boot of one tenant."""

    def __init__(self, worker: Worker, order: c.StartTenant) -> None:
        self.worker = worker
        self.order = order
        self.alive = True
        self.frozen = False
        """Says nothing (SIGSTOP); what it would have said meanwhile is lost."""
        self.weights = (0, -1)
        self.gang_epoch = 0
        self.rank, self.num_ranks = 0, 1
        self.arrived: set[str] = set()
        """Collectives that a trainer rank takes part in, or took."""
        self.incarnation = 0
        self.version = 0
        self.held: dict[str, int] = {}
        self.parts: dict[str, Part] = {}
        """What it generates: those of `held` that neither wait for an ack nor are handed over."""
        self.ending: set[tuple[str, int]] = set()
        """Finished, and not told yet."""
        self.isolated_until_s = 0.0
        """Until then nothing comes in or goes out; it all arrives later, in order (a partition)."""
        self.last_delivery_s = 0.0


class Tenants(RolloutTenants):
    """Carries out commands in a world's time, with its faults."""

    def handle(self, process: Process, command: c.Command) -> None:
        name = type(command).__name__.lower()
        getattr(self, f"_on_{name}")(process, command)

    def _on_configure(self, process: Process, command: c.Configure) -> None:
        if process.order.role != "trainer":
            self._world.later(0.2, lambda: self._ready(process, None, None))
            return
        assert process.gang_epoch == 0, "a boot is configured once"
        process.gang_epoch = command.gang_epoch
        process.rank, process.num_ranks = command.rank, command.num_ranks

        def restore() -> None:
            version = process.version = self._world.checkpoints.get(process.order.pipeline, 0)
            self._ready(process, version, command.gang_epoch)

        self._world.later(0.2, lambda: self._together(process, "start", restore))

    def _gang(self, process: Process) -> list[Process]:
        """The living ranks of its gang, itself included."""
        return [
            peer
            for peer in self._world.processes.values()
            if peer.alive
            and (peer.order.pipeline, peer.order.role) == (process.order.pipeline, "trainer")
            and peer.gang_epoch == process.gang_epoch
        ]

    def _together(self, process: Process, collective: str, then: Callable[[], None]) -> None:
        """Wait until all ranks take part: for ever where one is dead, until the node kills it."""
        process.arrived.add(collective)
        gang = self._gang(process)
        assert len({peer.rank for peer in gang}) == len(gang) <= process.num_ranks
        if sum(collective in peer.arrived for peer in gang) == process.num_ranks:
            then()
        elif process.alive:
            self._world.later(0.1, lambda: self._together(process, collective, then))

    def _ready(self, process: Process, version: int | None, gang_epoch: int | None) -> None:
        ready = e.WorkerReady(
            **self._head(process, "ready"),
            role=process.order.role,
            version=version,
            ledger=None if version is None else self._ledger(process, version),
            gang_epoch=gang_epoch,
        )
        self._world.say(process, ready)

    def _ledger(self, process: Process, version: int) -> Ledger:
        return self._world.ledgers.get((process.order.pipeline, version), Ledger())

    def _on_makegroups(self, process: Process, command: c.MakeGroups) -> None:
        made, failed = [], []
        for order in command.orders:
            if self._world.chance(self._world.faults.fail_work):
                failed.append(parts.GroupFailure(group=order.group, epoch=order.epoch, reason="no"))
            else:
                made.append(
                    parts.GroupMade(
                        group=order.group,
                        epoch=order.epoch,
                        ref=self._world.new_ref(),
                        num_prompt_tokens=3,
                    )
                )
        event = e.GroupsMade(**self._head(process, "made"), made=tuple(made), failed=tuple(failed))
        self._world.later(0.01, lambda: self._world.say(process, event))

    def _on_scoresequences(self, process: Process, command: c.ScoreSequences) -> None:
        rewarded = tuple(
            parts.SequenceReward(
                sequence=order.sequence,
                epoch=order.epoch,
                ref=self._world.new_ref(),
                reward=self._world.random.choice(NOT_FINITE)
                if self._world.chance(self._world.faults.fail_work)
                else self._reward(order.sequence),
            )
            for order in command.orders
        )
        event = e.SequencesRewarded(**self._head(process, "rewarded"), rewarded=rewarded)
        self._world.later(0.02, lambda: self._world.say(process, event))

    def _reward(self, sequence: str) -> float:
        """Different within a group, unless the world makes the group's rewards uniform."""
        group, _, index = sequence.rpartition("/s")
        uniform = Random(group).random() < self._world.faults.uniform_rewards
        return 1.0 if uniform else float(int(index) % 2)

    def _on_publishweights(self, process: Process, command: c.PublishWeights) -> None:
        assert command.version == process.version
        name = f"publish {command.version}"
        self._together(process, name, lambda: self._announce(process, command))

    def _announce(self, process: Process, command: c.BatchCut | c.PublishWeights) -> None:
        """Of a step each time what its checkpoint kept, also where an earlier boot trained it."""
        if process.rank > 0:
            return
        num_tokens = 100 if process.version > 0 else 0
        incarnation, manifest = command.incarnation, self._world.new_ref("WEIGHTS")
        newest = {(incarnation, process.version), (incarnation, process.version - 1)}
        kept = {*command.retain_versions, *newest}
        channel = self._world.channels.setdefault(process.order.pipeline, {})
        channel[manifest] = (incarnation, process.version)
        for ref in [ref for ref, named in channel.items() if named not in kept]:
            del channel[ref]
        event = e.VersionPublished(
            **self._head(process, "published"),
            gang_epoch=process.gang_epoch,
            incarnation=incarnation,
            version=process.version,
            manifest=manifest,
            num_bytes=1,
            num_trained_tokens=num_tokens,
            metrics={"loss": 1.0} if num_tokens else {},
        )
        self._world.say(process, event)

    def _on_batchcut(self, process: Process, command: c.BatchCut) -> None:
        assert command.version == process.version
        assert command.gang_epoch == process.gang_epoch
        name = f"train {command.version}"
        train = lambda: self._together(process, name, lambda: self._train(process, command))  # noqa: E731
        self._world.work(
            process, TRAIN_S, lambda: process.alive and train(), wanted=lambda: process.alive
        )

    def _train(self, process: Process, command: c.BatchCut) -> None:
        self._worked(
            process, "forward_backward", "optimizer", version=process.version, num_tokens=100
        )
        if process.rank > 0:
            return
        for rank in self._gang(process):
            rank.version += 1
        pipeline = process.order.pipeline
        self._world.ledgers[pipeline, process.version] = command.ledger
        due = process.version % self._world.checkpoint_every == 0
        if due and not self._world.chance(0.3):
            self._world.checkpoints[pipeline] = process.version
        last = self._world.scheduler.state.pipelines[pipeline].spec.num_steps
        if process.version == last:
            self._world.checkpoints[pipeline] = process.version
        if self._world.chance(self._world.faults.kill_per_s * 10):
            self._world.kill(process)
            return
        self._announce(process, command)
        if self._world.checkpoints.get(pipeline) == process.version:
            self._world.say(
                process,
                e.CheckpointCommitted(
                    **self._head(process, "checkpoint"),
                    gang_epoch=process.gang_epoch,
                    incarnation=command.incarnation,
                    version=process.version,
                    path="x",
                ),
            )

    def _on_evaluate(self, process: Process, command: c.Evaluate) -> None:
        pipeline = process.order.pipeline
        if command.manifest not in self._world.channels[pipeline]:
            current = self._world.scheduler.state.pipelines[pipeline].incarnation
            assert command.incarnation < current, "purged too early"
            self._world.say(
                process,
                e.EvaluationFailed(
                    **self._head(process, "not-evaluated"),
                    incarnation=command.incarnation,
                    version=command.version,
                    reason="the weights are gone: a rollback published them anew",
                ),
            )
            return
        event = e.EvaluationFinished(
            **self._head(process, "evaluated"),
            incarnation=command.incarnation,
            version=command.version,
            num_problems=10,
            num_correct=5,
            mean_reward=0.5,
            mean_num_tokens=5.0,
            duration_s=1.0,
        )
        self._world.later(
            self._world.random.uniform(0.5, 6.0), lambda: self._world.say(process, event)
        )
