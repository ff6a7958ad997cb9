"""What simulated tenants answer to the scheduler's commands: well-formed events, nothing else.

`fold` sends them at once, `cluster` when their time has come. It knows no time and keeps no state but
the number of the next record, which stands for what a real tenant would have stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jigsawrl.contract import commands, events, parts
from jigsawrl.contract.message import Ref, Role, SubStageKind, Worker

BOOT = "b"
"""Nobody restarts here."""


class Answers:
    """Makes events."""

    def __init__(self) -> None:
        self._data = 0

    def _ref(self) -> Ref:
        self._data += 1
        return Ref("D", self._data)

    def _made(self, held: parts.Held, num_tokens: int, version: int) -> dict[str, Any]:
        """What the end of a sequence and its export tell alike: so many tokens, all of one version."""
        return {
            "sequence": held.sequence,
            "epoch": held.epoch,
            "ref": self._ref(),
            "num_tokens": num_tokens,
            "min_version": version,
            "max_version": version,
        }

    def started(self, order: commands.StartTenant, *, node: str) -> events.WorkerStarted:
        """A process is up."""
        return events.WorkerStarted(
            id="s",
            pipeline=order.pipeline,
            worker=Worker(id=order.tenant, boot=BOOT),
            role=order.role,
            node=node,
            device=order.device,
        )

    def divided(
        self, node: Worker, device: str, shares: Iterable[tuple[str, float]]
    ) -> events.SharesApplied:
        """Exactly as asked."""
        return events.SharesApplied(
            id="d",
            node=node,
            device=device,
            shares=tuple(parts.AppliedShare(tenant=t, asked=s, applied=s) for t, s in shares),
            mechanism="simulated",
        )

    def ready(self, command: commands.Configure, *, role: Role) -> events.WorkerReady:
        """It takes work; a trainer begins at version 0."""
        trains = role == "trainer"
        return events.WorkerReady(
            id="r",
            **_by(command.worker),
            role=role,
            version=0 if trains else None,
            gang_epoch=command.gang_epoch if trains else None,
        )

    def loaded(self, command: commands.LoadWeights) -> events.WeightsLoaded:
        """It generates by them from now on."""
        return events.WeightsLoaded(
            id="l",
            **_by(command.worker),
            incarnation=command.incarnation,
            version=command.version,
        )

    def made(self, command: commands.MakeGroups, *, size: int) -> Iterable[events.GroupsMade]:
        """Prompts, `size` an event."""
        for start in range(0, len(command.orders), size):
            made = tuple(
                parts.GroupMade(
                    group=order.group, epoch=order.epoch, ref=self._ref(), num_prompt_tokens=9
                )
                for order in command.orders[start : start + size]
            )
            yield events.GroupsMade(id="m", **_by(command.worker), made=made)

    def accepted(self, command: commands.PlaceSequences) -> events.SequencesAccepted:
        """All of them."""
        return events.SequencesAccepted(
            id="a",
            **_by(command.worker),
            accepted=tuple(parts.Held(p.sequence, p.epoch) for p in command.placements),
        )

    def finished(
        self, worker: Worker, ended: Sequence[tuple[parts.Held, int, int]]
    ) -> events.SequencesFinished:
        """Of each its tokens and the version that made them."""
        return events.SequencesFinished(
            id="f",
            **_by(worker),
            finished=tuple(
                parts.SequenceFinish(finish_reason="stop", **self._made(held, num_tokens, version))
                for held, num_tokens, version in ended
            ),
        )

    def progressed(
        self, worker: Worker, made: Sequence[tuple[parts.Held, int]]
    ) -> events.SequencesProgressed:
        """How many tokens of each are stored."""
        return events.SequencesProgressed(
            id="p",
            **_by(worker),
            progress=tuple(
                parts.SequenceProgress(
                    sequence=held.sequence, epoch=held.epoch, ref=self._ref(), num_tokens=num_tokens
                )
                for held, num_tokens in made
            ),
        )

    def exported(
        self,
        worker: Worker,
        handed: Sequence[tuple[parts.Held, int, int]],
        gone: Iterable[parts.Held],
    ) -> events.SequencesExported:
        """What a source hands over, with its tokens and version, and what it no longer has."""
        return events.SequencesExported(
            id="e",
            **_by(worker),
            exported=tuple(
                parts.SequenceExport(**self._made(held, num_tokens, version))
                for held, num_tokens, version in handed
            ),
            finished=tuple(gone),
        )

    def rewarded(
        self, command: commands.ScoreSequences, *, size: int
    ) -> Iterable[events.SequencesRewarded]:
        """Scores, `size` an event."""
        for start in range(0, len(command.orders), size):
            rewarded = tuple(
                parts.SequenceReward(
                    sequence=o.sequence, epoch=o.epoch, ref=self._ref(), reward=1.0
                )
                for o in command.orders[start : start + size]
            )
            yield events.SequencesRewarded(
                id="w",
                **_by(command.worker),
                rewarded=rewarded,
            )

    def published(
        self, command: commands.PublishWeights | commands.BatchCut, *, version: int
    ) -> events.VersionPublished:
        """By rank 0."""
        return events.VersionPublished(
            id="v",
            **_by(command.worker),
            gang_epoch=command.gang_epoch,
            incarnation=command.incarnation,
            version=version,
            manifest=self._ref(),
            num_bytes=1,
            num_trained_tokens=1,
            metrics={},
        )

    def checkpointed(self, command: commands.BatchCut) -> events.CheckpointCommitted:
        """Of the version that the cut leads to."""
        return events.CheckpointCommitted(
            id="c",
            **_by(command.worker),
            gang_epoch=command.gang_epoch,
            incarnation=command.incarnation,
            version=command.version + 1,
            path="",
        )

    def worked(
        self,
        worker: Worker,
        spent: Iterable[tuple[SubStageKind, float, int]],
        *,
        version: int,
        now_s: float,
    ) -> events.SubStagesEnded:
        """Seconds and tokens by kind."""
        return events.SubStagesEnded(
            id="b",
            **_by(worker),
            spans=tuple(
                parts.SubStage(
                    kind=kind,
                    version=version,
                    started_s=now_s - duration_s,
                    ended_s=now_s,
                    duration_s=duration_s,
                    num_iterations=max(1, num_tokens),
                    num_tokens=num_tokens,
                )
                for kind, duration_s, num_tokens in spent
            ),
        )


def _by(worker: Worker) -> dict[str, Any]:
    """Whose event it is."""
    return {"pipeline": pipeline_of(worker), "worker": worker}


def pipeline_of(worker: Worker) -> str:
    """Whose tenant it is."""
    return worker.id.partition(".")[0]
