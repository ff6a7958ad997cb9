"""The trainer service: trains exactly the batches that the scheduler cuts, publishes each version's
weights, commits checkpoints, and writes the run folder. It decides nothing.

A restart restores the newest whole checkpoint; the scheduler says what to do again. Repeated commands
are answered again under the same ids: weights that are published and events that are stored twice
count once."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import structlog
import torch

from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import BatchCut, Command, Configure, PublishWeights
from jigsawrl.contract.events import (
    CheckpointCommitted,
    SubStagesEnded,
    VersionPublished,
    WorkerFailed,
)
from jigsawrl.contract.message import Role, message_id
from services.run import Context, RefusedError
from services.trainer.batch import Sample, load_samples, permute_rewards
from services.trainer.learner import Learner
from services.trainer.metrics import batch_metrics
from services.trainer.recorder import MetricsLine, Recorder
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError
from services.trainer.thread import TorchThread

log = structlog.get_logger()

SUBSTAGES_PERIOD_S = 0.5
NUM_KEPT_VERSIONS = 2
"""Newest versions that stay on the weight channel whatever the scheduler pins."""


class Trainer:
    """Tenant of role ``trainer``."""

    role: Role = "trainer"
    concurrency = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._thread = TorchThread()
        self._spans = Spans()
        self._config: PipelineConfig | None = None
        self._learner: Learner | None = None
        self._recorder: Recorder | None = None
        self._gang_epoch = 0
        self._metrics: dict[str, float] = {}
        """Of the step that made the version the learner holds; empty where it was restored."""
        self._num_trained_tokens = 0

    async def configure(self, config: PipelineConfig, command: Configure) -> int:
        """Restore or make a version, and commit it."""
        run_folder = self._context.run_folder
        if run_folder is None:
            raise RefusedError("a trainer needs --run-folder, where its checkpoints lie")
        self._config, self._gang_epoch = config, command.gang_epoch
        self._recorder = Recorder(Path(run_folder))
        loop = asyncio.get_running_loop()

        def progress(activity: str, done: int, total: int | None, detail: str) -> None:
            report = partial(
                self._context.report, activity, num_done=done, num_total=total, detail=detail
            )
            loop.call_soon_threadsafe(report)

        self._learner = learner = Learner(
            config,
            run_folder=Path(run_folder),
            gang_epoch=command.gang_epoch,
            device=_device(config, self._context.device),
            spans=self._spans,
            progress=progress,
            check_stop=self._thread.check,
        )
        try:
            version = await self._thread.run(learner.start)
            self._recorder.cut_back(version)
            await self._commit(command.incarnation)
        except (ValueError, OSError) as error:
            raise RefusedError(str(error)) from error
        return version

    async def handle(self, command: Command) -> None:
        """Train a batch or publish what is held."""
        if isinstance(command, BatchCut):
            await self._train(command)
        elif isinstance(command, PublishWeights):
            await self._publish(command.incarnation, cause=command.id)
        else:
            log.warning("ignored a command that is not for trainers", command=command.id)

    async def run(self) -> None:
        """Tell sub-stages as they end."""
        while True:
            await asyncio.sleep(SUBSTAGES_PERIOD_S)
            await self._tell_substages()

    async def close(self) -> None:
        """End the running work at its next check."""
        self._thread.stop()

    @property
    def _held(self) -> Learner:
        assert self._learner is not None
        return self._learner

    # --- Commands ---------------------------------------------------------------------------------

    async def _train(self, cut: BatchCut) -> None:
        learner = self._held
        if learner.version == cut.version:
            await self._step(cut)
        elif learner.version != cut.version + 1:
            log.warning("ignored a cut of another version", cut=cut.version, held=learner.version)
            return
        await self._publish(cut.incarnation, cause=cut.id)
        if learner.checkpoint_is_due():
            await self._commit(cut.incarnation)
        newest = range(max(0, learner.version - NUM_KEPT_VERSIONS + 1), learner.version + 1)
        await self._context.bus.retain_weights(
            self._context.pipeline, cut.incarnation, {*cut.retain_versions, *newest}
        )

    async def _step(self, cut: BatchCut) -> None:
        assert self._config is not None
        assert self._recorder is not None
        learner = self._held
        begun = time.monotonic()
        samples = await load_samples(self._context.bus, cut)
        if self._config.trainer.control == "permuted_rewards":
            samples = permute_rewards(samples, seed=self._config.seed, version=cut.version)
        try:
            metrics = await self._thread.run(
                partial(learner.train, samples, version=cut.version, cursor=cut.cursor)
            )
        except NotFiniteError as error:
            await self._refuse(cut, samples, str(error))
            raise
        metrics |= batch_metrics(samples, cut=cut, train_s=time.monotonic() - begun)
        self._metrics = metrics
        self._num_trained_tokens = int(metrics["generated_tokens"])
        line = MetricsLine(
            version=learner.version,
            incarnation=cut.incarnation,
            gang_epoch=self._gang_epoch,
            time_s=time.time(),
            metrics=metrics,
        )
        await asyncio.to_thread(self._recorder.record, line, samples)

    async def _refuse(self, cut: BatchCut, samples: list[Sample], reason: str) -> None:
        """The step is not taken; its batch stays for inspection, and the pipeline ends."""
        assert self._recorder is not None
        await asyncio.to_thread(self._recorder.keep_refused, cut.version + 1, samples)
        groups = ", ".join(group.group for group in cut.groups)
        await self._context.bus.publish_event(
            WorkerFailed(
                id=self._context.new_id(WorkerFailed.tag()),
                cause=cut.id,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                reason=f"the step from version {cut.version} was refused: {reason}; its batch is"
                f" kept in trajectories/refused-v{cut.version + 1}.jsonl (groups {groups})",
            )
        )

    async def _publish(self, incarnation: int, *, cause: str) -> None:
        context, learner = self._context, self._held
        begun = time.monotonic()
        with self._spans.span("weight_sync", version=learner.version):
            manifest, payload = await self._thread.run(
                partial(learner.pack_weights, pipeline=context.pipeline, incarnation=incarnation)
            )
            ref = await context.bus.publish_weights(manifest, payload)
        log.info(
            "published",
            version=learner.version,
            seconds=round(time.monotonic() - begun, 3),
        )
        await self._tell_substages()
        await context.bus.publish_event(
            VersionPublished(
                id=message_id(
                    VersionPublished.tag(),
                    context.pipeline,
                    incarnation,
                    learner.version,
                    self._gang_epoch,
                ),
                cause=cause,
                pipeline=context.pipeline,
                worker=context.worker,
                gang_epoch=self._gang_epoch,
                incarnation=incarnation,
                version=learner.version,
                manifest=ref,
                num_bytes=manifest.num_bytes,
                num_trained_tokens=self._num_trained_tokens,
                metrics=self._metrics,
            )
        )

    async def _commit(self, incarnation: int) -> None:
        context, learner = self._context, self._held
        path = await self._thread.run(learner.commit_checkpoint)
        await context.bus.publish_event(
            CheckpointCommitted(
                id=message_id(
                    CheckpointCommitted.tag(),
                    context.pipeline,
                    incarnation,
                    learner.version,
                    self._gang_epoch,
                ),
                pipeline=context.pipeline,
                worker=context.worker,
                gang_epoch=self._gang_epoch,
                incarnation=incarnation,
                version=learner.version,
                path=str(path),
            )
        )

    async def _tell_substages(self) -> None:
        spans = self._spans.drain()
        if spans:
            await self._context.bus.publish_event(
                SubStagesEnded(
                    id=self._context.new_id(SubStagesEnded.tag()),
                    pipeline=self._context.pipeline,
                    worker=self._context.worker,
                    spans=spans,
                )
            )


def _device(config: PipelineConfig, device: str | None) -> torch.device:
    on_gpu = "/cuda" in device if device is not None else config.device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise RefusedError(f"device {device or config.device}: torch sees no CUDA device here")
    return torch.device("cuda" if on_gpu else "cpu")
