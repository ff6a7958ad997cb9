"""The trainer tenant: commands in, versions out. Owns the protocol; `Learner` owns everything torch.

`services.run` calls it. A command may come again at any point (delivery is at least once), so all that
follows a step can be done twice with the effect of once, and message ids are made of (pipeline,
incarnation, version, gang epoch). The announcement comes last: after the announcement of the last
version the scheduler may stop this process, and by then its checkpoint and records must be on disk.

Of several ranks each is such a process and gets each command. All take part in what is a collective
(the step, gathering weights and checkpoints); rank 0 alone writes files and announces. A command that
only one rank gets again must start no collective: what was gathered once is not gathered again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from jigsawrl.bus.base import MessageTooLargeError, RecordGoneError, StreamFullError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import BatchCut, Configure, PublishWeights
from jigsawrl.contract.events import (
    CheckpointCommitted,
    SubStagesEnded,
    VersionPublished,
    WorkerRefused,
)
from jigsawrl.contract.message import Ref, Role, message_id
from jigsawrl.contract.records import WeightManifest
from jigsawrl.models.device import choose_device
from services.run import Context, RefusedError, Restored
from services.trainer.batch import Sample, load_records
from services.trainer.checkpoint import StepTotals
from services.trainer.learner import Learner
from services.trainer.meeting import Meeting
from services.trainer.metrics import batch_metrics
from services.trainer.parallel import leave_gang
from services.trainer.recorder import MetricsLine, Recorder, Trained
from services.trainer.shaping import samples_of
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError
from services.trainer.thread import StoppedError, TorchThread
from services.trainer.tracked import Tracked

log = structlog.get_logger()

SPANS_EVERY_S = 0.5
"""Sub-stage events are coalesced to this."""
ROOM_PAUSE_S = 1.0
"""Between two tries on a full weight channel."""
PEER_GRACE_S = 5.0
"""After a collective failed: its node kills this rank sooner, if that was because another one ended."""
NUM_NEWEST_VERSIONS = 2
"""Versions that stay on the weight channel beside those that the scheduler names."""


class Trainer:
    """One boot of one pipeline's trainer."""

    role: Role = "trainer"
    concurrency = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = TorchThread(stop_timeout_s=context.stop_timeout_s)
        self._spans = Spans()
        self._trained: Trained | None = None
        """The step that led to the version that stands; kept until the next, for repeats."""
        self._config: PipelineConfig
        self._learner: Learner
        self._recorder: Recorder
        self._tracked = Tracked()
        self._gang_epoch, self._rank, self._num_ranks = 0, 0, 1
        self._gathered: tuple[int, int] | None = None
        """With several ranks: (incarnation, version) of the weights that they gathered last."""
        self._sent: tuple[WeightManifest, Ref] | None = None
        """Rank 0: those weights on the channel."""
        self._started = False
        """A version stands; there is something to leave a checkpoint of."""

    async def configure(self, config: PipelineConfig, command: Configure) -> Restored:
        """Restore or make the model; commits version 0 or confirms what was restored."""
        if self._context.run_folder is None:
            raise RefusedError("the trainer has no run folder: start it with --run-folder DIR")
        run_folder = Path(self._context.run_folder)
        loop = asyncio.get_running_loop()

        def progress(activity: str, num_done: int, num_total: int | None, detail: str) -> None:
            report = partial(self._context.report, num_done=num_done, num_total=num_total)
            loop.call_soon_threadsafe(partial(report, activity, detail=detail))

        self._config, device = config, choose_device(config.device, self._context.device)
        self._spans.on_cpu = device.type == "cpu"
        self._gang_epoch, self._rank = command.gang_epoch, command.rank
        self._num_ranks = command.num_ranks
        try:
            if self._rank == 0:
                self._tracked.configure(config, self._context, run_folder)
            self._recorder = Recorder(run_folder, tracking=self._tracked.tracking)
            self._learner = Learner(
                config,
                run_folder=run_folder,
                gang_epoch=command.gang_epoch,
                device=device,
                spans=self._spans,
                progress=progress,
                check_stop=self._thread.check,
                meeting=self._meeting(run_folder),
            )
            version = await self._thread.run(self._learner.start)
            # Under this gang's epoch also where it was restored, and first: an older gang that still
            # runs neither wins against it nor records any more.
            path = await self._thread.run(self._learner.commit_checkpoint)
            if self._rank == 0:
                await self._thread.run(partial(self._recorder.cut_back, version))
        except (ValueError, OSError) as error:
            raise RefusedError(_one_line(error)) from error
        except (RuntimeError, StoppedError) as error:
            await self._wait_for_the_end(error)
            raise
        self._started = True
        await self._announce_checkpoint(command.incarnation, path, cause=command.id)
        await self._publish_spans()
        return Restored(version=version, ledger=self._learner.ledger)

    async def handle(self, command: Any) -> None:
        """`BatchCut` and `PublishWeights`; anything else is not a trainer's."""
        if not isinstance(command, BatchCut | PublishWeights):
            log.warning("refused a command that is not a trainer's", command=command.id)
            return
        if command.gang_epoch != self._gang_epoch:
            log.warning("refused a command to another gang", command=command.id)
            return
        try:
            if isinstance(command, BatchCut):
                await self._on_cut(command)
            else:
                await self._on_publish(command)
        except (
            NotFiniteError,
            RecordGoneError,
            MessageTooLargeError,
            ValueError,
            OSError,
        ) as error:
            # No repeat can help: the pipeline fails with the reason, its batch stays stored.
            await self._refuse(command, _one_line(error))
        except (RuntimeError, StoppedError) as error:
            await self._wait_for_the_end(error)
            raise
        finally:
            await self._publish_spans()

    def _meeting(self, run_folder: Path) -> Meeting | None:
        if self._num_ranks == 1:
            return None
        return Meeting(
            run_folder=run_folder,
            gang_epoch=self._gang_epoch,
            rank=self._rank,
            num_ranks=self._num_ranks,
        )

    async def _wait_for_the_end(self, error: Exception) -> None:
        """With several ranks: the end of this one is another's, most likely, and its node will kill or
        stop it: no failure of its own. It is one where nobody does."""
        if self._num_ranks == 1:
            return
        if not isinstance(error, StoppedError):
            self._started = False  # the ranks are no longer at one point
            log.warning("a collective failed, another rank may be gone", reason=_one_line(error))
        await asyncio.sleep(PEER_GRACE_S)

    async def run(self) -> None:
        """Let the scheduler see sub-stages while a step runs, and trackers what it is told."""
        await asyncio.gather(self._tell_spans(), self._tracked.run())

    async def close(self) -> None:
        """End the running work at its next check, leave a checkpoint, and leave the gang."""
        await self._tracked.close(after=self._thread.stop(self._leave))

    def _leave(self) -> None:
        if self._started:
            self._record()
            self._learner.commit_at_stop()
        leave_gang()

    # --- Commands ---------------------------------------------------------------------------------

    async def _on_cut(self, cut: BatchCut) -> None:
        standing = self._learner.version
        if not cut.groups or not all(group.sequences for group in cut.groups):
            raise ValueError("told to train a batch without groups, or a group without sequences")
        if cut.version == standing:
            await self._train(cut)
        elif cut.version > standing:
            raise ValueError(f"told to train from version {cut.version}, but holds {standing}")
        if cut.version >= standing - 1:  # an older one is a new leader's repeat of what is done
            await self._complete(cut)

    async def _on_publish(self, command: PublishWeights) -> None:
        if command.version < self._learner.version:
            log.warning("version is gone, a newer one stands", command=command.id)
            return
        if command.version > self._learner.version:
            raise ValueError(
                f"told to publish version {command.version}, but holds {self._learner.version}"
            )
        await self._announce_version(
            command.incarnation, await self._publish_weights(command), cause=command.id
        )

    async def _train(self, cut: BatchCut) -> None:
        self._context.report("load batch", num_done=cut.version)
        records = await load_records(self._context.bus, cut)
        samples, shaping = await self._thread.run(
            partial(samples_of, records, self._config, version=cut.version)
        )
        self._context.report(
            "train", num_done=cut.version, num_total=self._config.trainer.num_steps
        )
        try:
            await self._thread.run(partial(self._step, samples, shaping, cut=cut))
        except NotFiniteError:
            if self._rank == 0:
                keep = partial(self._recorder.keep_refused, cut.version + 1, samples)
                await self._thread.run(keep)
            raise

    def _step(self, samples: Sequence[Sample], shaping: dict[str, float], *, cut: BatchCut) -> None:
        """One piece of work of the thread: a stop finds it undone, or done and ready to be told."""
        start = time.monotonic()
        metrics = self._learner.train(samples, version=cut.version, ledger=cut.ledger)
        train_s = time.monotonic() - start
        metrics = batch_metrics(samples, cut=cut, train_s=train_s) | shaping | metrics
        self._learner.totals = StepTotals.of(metrics)
        self._trained = Trained(
            samples=samples,
            line=MetricsLine(
                version=self._learner.version,
                incarnation=cut.incarnation,
                gang_epoch=self._gang_epoch,
                time_s=time.time(),
                metrics=metrics,
            ),
        )

    async def _complete(self, cut: BatchCut) -> None:
        """All that follows a step; every part may be repeated. The record comes before the
        checkpoint: a trainer that restores this version could not write it any more."""
        await self._thread.run(self._record)
        sent = await self._publish_weights(cut)
        if self._learner.checkpoint_is_due():
            self._context.report("checkpoint", num_done=self._learner.version)
            path = await self._thread.run(self._learner.commit_checkpoint)
            await self._announce_checkpoint(cut.incarnation, path, cause=cut.id)
        await self._announce_version(cut.incarnation, sent, cause=cut.id)

    def _record(self) -> None:
        if self._trained is not None and self._rank == 0:
            self._recorder.record(self._trained.line, self._trained.samples)

    # --- Messages ---------------------------------------------------------------------------------

    async def _publish_weights(
        self, command: BatchCut | PublishWeights
    ) -> tuple[WeightManifest, Ref] | None:
        """Old versions go first, so that there is room; where there is none still, it waits: a full
        channel slows the run and loses nothing. None for ranks that only help to gather."""
        version, incarnation = self._learner.version, command.incarnation
        if self._gathered == (incarnation, version):
            return self._sent
        await self._publish_spans()  # before the step's end, or it would look shorter
        if self._rank > 0:
            with self._spans.span("weight_sync", version=version):
                await self._thread.run(self._learner.take_part_in_packing)
        else:
            self._sent = await self._pack_and_send(command)
        if self._num_ranks > 1:
            self._gathered = (incarnation, version)
        return self._sent

    async def _pack_and_send(
        self, command: BatchCut | PublishWeights
    ) -> tuple[WeightManifest, Ref]:
        version, incarnation = self._learner.version, command.incarnation
        pipeline, bus = self._context.pipeline, self._context.bus
        self._context.report("publish weights", num_done=version)
        newest = {(incarnation, v) for v in range(version - NUM_NEWEST_VERSIONS + 1, version + 1)}
        with self._spans.span("weight_sync", version=version):
            pack = partial(self._learner.pack_weights, pipeline=pipeline, incarnation=incarnation)
            manifest, payload = await self._thread.run(pack)
            while True:
                await bus.retain_weights(pipeline, {*command.retain_versions, *newest})
                try:
                    return manifest, await bus.publish_weights(manifest, payload)
                except StreamFullError as error:
                    self._report_no_room(error)
                    await asyncio.sleep(ROOM_PAUSE_S)

    def _report_no_room(self, error: StreamFullError) -> None:
        log.warning("waits for room on the weight channel", reason=str(error))
        self._context.report(
            "wait for room on the weight channel",
            num_done=self._learner.version,
            num_total=self._config.trainer.num_steps,
            detail=str(error),
        )

    async def _announce_version(
        self, incarnation: int, sent: tuple[WeightManifest, Ref] | None, *, cause: str
    ) -> None:
        """With what is told of its step, though an earlier boot, which died, may have trained it."""
        if sent is None:
            return
        manifest, ref = sent
        totals = self._learner.totals
        await self._context.bus.publish_event(
            VersionPublished(
                id=self._id(VersionPublished.tag(), incarnation, manifest.version),
                cause=cause,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                gang_epoch=self._gang_epoch,
                incarnation=incarnation,
                version=manifest.version,
                manifest=ref,
                num_bytes=manifest.num_bytes,
                num_trained_tokens=totals.num_trained_tokens,
                metrics=totals.metrics,
            )
        )

    async def _announce_checkpoint(self, incarnation: int, path: Path, *, cause: str) -> None:
        version = self._learner.version
        if self._rank > 0 or not path.exists():  # not written: a later gang's are there
            return
        await self._context.bus.publish_event(
            CheckpointCommitted(
                id=self._id(CheckpointCommitted.tag(), incarnation, version),
                cause=cause,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                gang_epoch=self._gang_epoch,
                incarnation=incarnation,
                version=version,
                path=str(path),
            )
        )

    async def _refuse(self, command: BatchCut | PublishWeights, reason: str) -> None:
        log.error("refused", command=command.id, reason=reason)
        if isinstance(command, BatchCut):
            groups = ", ".join(group.group for group in command.groups)
            reason = f"step from version {command.version}: {reason} (groups {groups})"
        await self._context.bus.publish_event(
            WorkerRefused(
                id=self._id(WorkerRefused.tag(), command.incarnation, command.version),
                cause=command.id,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                reason=reason,
            )
        )

    async def _tell_spans(self) -> None:
        while True:
            await asyncio.sleep(SPANS_EVERY_S)
            await self._publish_spans()

    async def _publish_spans(self) -> None:
        spans = self._spans.drain()
        if not spans:
            return
        await self._context.bus.publish_event(
            SubStagesEnded(
                id=self._context.new_id(SubStagesEnded.tag()),
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                spans=spans,
            )
        )

    def _id(self, tag: str, incarnation: int, version: int) -> str:
        other = (self._rank,) if self._rank > 0 else ()
        return message_id(
            tag, self._context.pipeline, incarnation, version, self._gang_epoch, *other
        )


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'disk'}: {error.strerror}; free space or mend its permissions"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
