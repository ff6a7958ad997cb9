"""All torch state of a trainer: policy, reference, critic, optimizers, and the version they stand at.

The tenant calls every method in its one torch thread. The learner knows files and tensors, nothing of
messages but the manifest that describes packed weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from jigsawrl.config import InitModelConfig, PipelineConfig
from jigsawrl.config_algorithm import PPOConfig
from jigsawrl.contract.message import Ledger
from jigsawrl.contract.records import WeightManifest
from jigsawrl.models.init import build_model
from jigsawrl.models.loading import DTYPES, load_model, model_from_config
from jigsawrl.models.tokenizer import load_tokenizer
from jigsawrl.models.weights import pack
from jigsawrl.tasks import Task, build_task
from services.trainer import checkpoint
from services.trainer.batch import Sample
from services.trainer.critic import CriticStep, backbone_state, build_critic
from services.trainer.meeting import Meeting
from services.trainer.parallel import (
    Gang,
    full_state,
    join_gang,
    load_full_state,
    optimizer_tensors,
    restore_optimizer,
    shard,
)
from services.trainer.schedule import learning_rate
from services.trainer.spans import Spans
from services.trainer.step import NotFiniteError, Step, StepSettings
from services.trainer.thread import StoppedError
from services.trainer.warmup import warm_up

log = structlog.get_logger()

Progress = Callable[[str, int, int | None, str], None]
"""Told (activity, number done, number in total, detail)."""


class Learner:
    """One pipeline's training state; built empty, filled by `start`."""

    def __init__(
        self,
        config: PipelineConfig,
        *,
        run_folder: Path,
        gang_epoch: int,
        device: torch.device,
        spans: Spans,
        progress: Progress,
        check_stop: Callable[[], None],
        meeting: Meeting | None = None,
    ) -> None:
        """`meeting` is None for a gang of one."""
        self.version = 0
        self.ledger = Ledger()
        self.totals = checkpoint.StepTotals()
        """Of the step that led to `version`, as the tenant sums it up after `train`."""
        self._whole = False
        """Whether the weights are those of `version`: not before the start, nor between the updates of
        an abandoned step."""
        self._saved_version: int | None = None
        """Version whose state was last gathered and committed, the same on all ranks."""
        self._meeting = meeting
        self._leads = meeting is None or meeting.rank == 0
        """Rank 0 of its gang: the one that reads, makes and writes."""
        self._config = config
        self._run_folder = run_folder
        self._gang_epoch = gang_epoch
        self._device = device
        self._spans = spans
        self._progress = progress
        self._check_stop = check_stop
        self._settings = StepSettings.of(config)
        self._policy: Any = None
        self._reference: Any = None
        self._gang: Gang
        self._optimizer: torch.optim.AdamW
        self._critic: Any = None
        self._critic_optimizer: torch.optim.AdamW
        self._tokenizer: Any = None

    def start(self) -> int:
        """Restore the best checkpoint, or make version 0; the version that stands.

        Raises ValueError or OSError, in one line, where that can't be done."""
        torch.set_num_threads(1)
        task = build_task(self._config.task, seed=self._config.seed)
        self._tokenizer = load_tokenizer(self._config.model, task.alphabet)
        self._progress("load", 0, None, "looking for a checkpoint")
        saved, model = self._meet(task)
        # Each rank's own weights are sharded; those of version 0 are rank 0's.
        whole = None if self._meeting is None or saved is not None else full_state(model)
        self._policy = self._place(model)
        if whole is not None:
            load_full_state(self._policy, whole)
        self._optimizer = self._adam_w(self._policy)
        algorithm = self._config.algorithm
        model_config = self._policy.config.to_json_string()
        if algorithm.kl is not None:
            self._reference = self._place(
                model_from_config(model_config, dtype=torch.float32)
            ).requires_grad_(False)
        if isinstance(algorithm, PPOConfig):
            self._critic = self._place(build_critic(model_config, dtype=torch.float32))
            self._critic_optimizer = self._adam_w(self._critic)
        if saved is not None:
            self._restore(saved)
        else:
            self._fill_from_policy()
        self._whole = True
        return self.version

    def train(self, samples: Sequence[Sample], *, version: int, ledger: Ledger) -> dict[str, float]:
        """The step from `version`; its metrics. On any exception the version does not change, and the
        weights are not to be used: the process must end (`commit_at_stop` knows whether they are those
        of the version still) or restore."""
        assert version == self.version
        rate = self._set_learning_rate(
            self._optimizer, self._config.trainer.optimizer.learning_rate
        )
        critic = self._critic_step(samples)
        step = Step(
            samples,
            policy=self._policy,
            reference=self._reference,
            gang=self._gang,
            settings=self._settings,
            version=version,
            spans=self._spans,
            critic=critic,
            check_stop=partial(self._gang.check_stop, self._check_stop),
        )
        try:
            metrics = step.train(self._optimizer)
        except BaseException as error:
            # What ends a step on all ranks at one point; anything else leaves them at different ones.
            together = self._meeting is None or isinstance(error, StoppedError | NotFiniteError)
            self._whole = step.num_updates == 0 and together
            raise
        self.version = version + 1
        self.ledger, self.totals = ledger, checkpoint.StepTotals()
        return metrics | {"learning_rate": rate}

    def pack_weights(self, *, pipeline: str, incarnation: int) -> tuple[WeightManifest, memoryview]:
        """The policy as the weight channel carries it, in the dtype the policy computes in; the other
        ranks `take_part_in_packing` meanwhile.

        Raises ValueError where it is too large for the channel."""
        dtype = DTYPES[self._config.trainer.dtype]
        return pack(
            {name: tensor.to(dtype) for name, tensor in full_state(self._policy).items()},
            pipeline=pipeline,
            incarnation=incarnation,
            version=self.version,
            model_config=self._policy.config.to_json_string(),
        )

    def take_part_in_packing(self) -> None:
        """What the other ranks do while rank 0 packs."""
        full_state(self._policy)

    def checkpoint_is_due(self) -> bool:
        """At version 0, every ``checkpoint.every`` versions, and at the last."""
        last = self._config.trainer.num_steps
        return self.version == last or self.version % self._config.trainer.checkpoint.every == 0

    def commit_checkpoint(self) -> Path:
        """Write and commit the state, drop old checkpoints; nothing to do where it is there, or where a
        later gang writes. All ranks gather it, rank 0 writes."""
        path = checkpoint.path_of(
            self._run_folder, version=self.version, gang_epoch=self._gang_epoch
        )
        if self._saved_version == self.version:
            return path
        tensors = self._tensors()
        if self._leads and not checkpoint.is_committed(path) and not self.is_replaced():
            self._write_checkpoint(tensors)
        self._saved_version = self.version
        return path

    def _write_checkpoint(self, tensors: dict[str, dict[str, Tensor]]) -> None:
        with self._spans.span("checkpoint", version=self.version):
            path = checkpoint.write_files(
                self._run_folder,
                state=checkpoint.CheckpointState(
                    pipeline=self._config.name,
                    version=self.version,
                    gang_epoch=self._gang_epoch,
                    ledger=self.ledger,
                    totals=self.totals,
                    dtype=self._config.trainer.dtype,
                    model_config=self._policy.config.to_json_string(),
                ),
                tensors=tensors,
                tokenizer=self._tokenizer,
            )
            checkpoint.commit(path)
            checkpoint.prune(
                self._run_folder,
                keep_last=self._config.trainer.checkpoint.keep_last,
                gang_epoch=self._gang_epoch,
            )

    def is_replaced(self) -> bool:
        """Whether a later gang writes into the run folder."""
        return checkpoint.is_replaced(self._run_folder, gang_epoch=self._gang_epoch)

    def commit_at_stop(self) -> None:
        """Leave a checkpoint of the version that stands, where the weights are still its own and all
        ranks stop here."""
        if not self._whole or self._saved_version == self.version:
            return
        if self._meeting is not None and not self._meeting.agree_to_stop(self.version):
            log.warning("no last checkpoint: the ranks did not stop together")
            return
        self.commit_checkpoint()

    # --- Models -----------------------------------------------------------------------------------

    def _meet(self, task: Task) -> tuple[checkpoint.Checkpoint | None, Any]:
        """Join the gang, with what rank 0 restores and a model to shard. Rank 0 has its model first, so
        that nobody waits for a warm-up in a collective."""
        meeting, saved, model = self._meeting, None, None
        if self._leads:
            saved = self._saved_checkpoint()
            model = self._model(saved, task)
        if meeting is None:
            self._gang = join_gang(self._device)
            return saved, model
        if meeting.rank == 0:
            meeting.open()
        else:
            self._progress("wait", 0, None, "for rank 0")
            meeting.wait(self._check_stop)
        self._gang = join_gang(
            self._device, rank=meeting.rank, num_ranks=meeting.num_ranks, meeting=meeting.file
        )
        chosen = (0, 0) if saved is None else (saved.state.version + 1, saved.state.gang_epoch + 1)
        agreed = torch.tensor(chosen, dtype=torch.float64, device=self._device)
        version, gang_epoch = (int(number) - 1 for number in self._gang.max(agreed).tolist())
        if meeting.rank > 0:
            if version >= 0:
                saved = checkpoint.read(
                    checkpoint.path_of(self._run_folder, version=version, gang_epoch=gang_epoch)
                )
            model = self._model(saved, task)
        return saved, model

    def _saved_checkpoint(self) -> checkpoint.Checkpoint | None:
        if self.is_replaced():
            raise ValueError(
                f"{self._run_folder} holds checkpoints of a later gang than {self._gang_epoch}: this"
                " trainer was replaced, or the cluster has forgotten the run (its store is gone);"
                " move that folder away, or submit under another name"
            )
        saved = checkpoint.latest(self._run_folder)
        if saved is not None and saved.state.pipeline != self._config.name:
            raise ValueError(
                f"{self._run_folder} holds checkpoints of pipeline {saved.state.pipeline}: give"
                f" {self._config.name} a run folder of its own"
            )
        return saved

    def _model(self, saved: checkpoint.Checkpoint | None, task: Task) -> Any:
        if saved is None:
            return self._fresh_model(task)
        log.info("restoring", checkpoint=saved.path.name)
        return model_from_config(saved.state.model_config, dtype=torch.float32)

    def _fresh_model(self, task: Task) -> Any:
        config = self._config
        if not isinstance(config.model, InitModelConfig):
            self._progress("load", 0, None, config.model.path)
            return load_model(config.model.path, dtype=torch.float32)
        model = build_model(config.model, self._tokenizer, seed=config.seed).to(self._device)
        warmup = config.model.warmup
        if warmup is not None and self._leads:
            result = warm_up(
                model,
                task=task,
                tokenizer=self._tokenizer,
                config=warmup,
                report=lambda done, accuracy: self._progress(
                    "warm-up",
                    done,
                    warmup.max_steps,
                    f"accuracy {accuracy:.2f}, stops at {warmup.target_accuracy:.2f}",
                ),
                check_stop=self._check_stop,
            )
            log.info("warmed up", num_steps=result.num_steps, accuracy=round(result.accuracy, 3))
        return model

    def _fill_from_policy(self) -> None:
        """Reference and critic of version 0."""
        if self._reference is None and self._critic is None:
            return
        state = full_state(self._policy)
        if self._reference is not None:
            load_full_state(self._reference, state)
        if self._critic is not None:
            load_full_state(self._critic.model, backbone_state(state))

    def _critic_step(self, samples: Sequence[Sample]) -> CriticStep | None:
        algorithm = self._config.algorithm
        if not isinstance(algorithm, PPOConfig):
            return None
        self._set_learning_rate(self._critic_optimizer, algorithm.critic.learning_rate)
        return CriticStep(
            samples,
            critic=self._critic,
            optimizer=self._critic_optimizer,
            gang=self._gang,
            algorithm=algorithm,
            max_grad_norm=self._config.trainer.optimizer.max_grad_norm,
        )

    def _adam_w(self, model: Any) -> torch.optim.AdamW:
        """The learning rate is set before each step."""
        optimizer = self._config.trainer.optimizer
        return torch.optim.AdamW(
            model.parameters(),
            betas=(optimizer.beta1, optimizer.beta2),
            weight_decay=optimizer.weight_decay,
        )

    def _set_learning_rate(self, optimizer: torch.optim.AdamW, base: float) -> float:
        rate = learning_rate(
            self._config.trainer.schedule,
            version=self.version,
            num_steps=self._config.trainer.num_steps,
            base_learning_rate=base,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _place(self, model: Any) -> Any:
        # Never train(): log-probs must be those of the policy that was sampled, without dropout.
        return shard(model.to(self._device).eval(), self._gang, dtype=self._config.trainer.dtype)

    # --- State ------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, dict[str, Tensor]]:
        rng = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            rng["cuda"] = torch.cuda.get_rng_state(self._device)
        tensors = {
            "model": full_state(self._policy),
            "optimizer": optimizer_tensors(self._policy, self._optimizer),
            "rng": rng,
        }
        if self._reference is not None:
            tensors["reference"] = full_state(self._reference)
        if self._critic is not None:
            tensors["critic"] = full_state(self._critic)
            tensors["critic_optimizer"] = optimizer_tensors(self._critic, self._critic_optimizer)
        return tensors

    def _restore(self, saved: checkpoint.Checkpoint) -> None:
        load_full_state(self._policy, saved.tensors["model"])
        if self._reference is not None:
            load_full_state(self._reference, _part(saved, "reference", "algorithm.kl"))
        if self._critic is not None:
            why = 'algorithm.type = "ppo"'
            load_full_state(self._critic, _part(saved, "critic", why))
            restore_optimizer(
                self._critic, self._critic_optimizer, _part(saved, "critic_optimizer", why)
            )
        restore_optimizer(self._policy, self._optimizer, saved.tensors["optimizer"])
        torch.set_rng_state(saved.tensors["rng"]["cpu"])
        if "cuda" in saved.tensors["rng"] and self._device.type == "cuda":
            torch.cuda.set_rng_state(saved.tensors["rng"]["cuda"], self._device)
        self.version = saved.state.version
        self.ledger, self.totals = saved.state.ledger, saved.state.totals


def _part(saved: checkpoint.Checkpoint, name: str, why: str) -> dict[str, Tensor]:
    if name not in saved.tensors:
        raise ValueError(
            f"checkpoint {saved.path} has no {name} weights, which {why} needs; it was written by a"
            " run without it"
        )
    return saved.tensors[name]
