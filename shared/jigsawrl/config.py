"""The configuration of one pipeline: frozen structs, defaults and the rules between keys.

Tables that only matter when a feature is on are optional tables (``[algorithm.kl]``,
``[evaluation]``), and choices with keys of their own are tagged unions (``type = "..."``): so a key
that would have no effect can hardly be written. Unknown keys are errors (`forbid_unknown_fields`).
`jigsawrl.cli.config_file` reads TOML and makes one-line errors; services get the resolved config as
MessagePack in their `Configure` command.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from jigsawrl.config_algorithm import AlgorithmConfig, GRPOConfig
from jigsawrl.config_base import (
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    NumProcesses,
    PositiveFloat,
    PositiveInt,
    Table,
)
from jigsawrl.config_scheduling import SchedulingConfig
from jigsawrl.config_task import JsonlTaskConfig as JsonlTaskConfig
from jigsawrl.config_task import ReasoningGymConfig as ReasoningGymConfig
from jigsawrl.config_task import SortDigitsConfig as SortDigitsConfig
from jigsawrl.config_task import TaskConfig as TaskConfig
from jigsawrl.config_task import TaskTurns, turns_of
from jigsawrl.config_tracking import TrackingConfig
from jigsawrl.contract.spec import DynamicSamplingSpec, EvaluationSpec, MemorySpec, PipelineSpec
from jigsawrl.contract.streams import check_name

# --- Model ---------------------------------------------------------------------------------------


class WarmupConfig(Table, frozen=True, kw_only=True):
    """Supervised steps on task samples before RL, until the model solves a share of fresh ones."""

    target_accuracy: Fraction = 0.5
    """Stops when this share of the latest fresh samples is solved greedily before being trained on."""
    learning_rate: PositiveFloat = 3e-3
    batch_size: PositiveInt = 64
    max_steps: PositiveInt = 4000


ARCHITECTURES = ("qwen3", "llama")
"""``model_type`` of the Hugging Face checkpoints that the embedded engine can run."""


class InitModelConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="init"):
    """A small Qwen3-architecture model and a character tokenizer, from nothing."""

    hidden_size: PositiveInt = 128
    intermediate_size: PositiveInt = 384
    num_layers: PositiveInt = 3
    num_heads: PositiveInt = 4
    num_kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 32
    max_position_embeddings: PositiveInt = 512
    warmup: WarmupConfig | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even (rotary embeddings pair dimensions)")


class PathModelConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="path"):
    """A local Hugging Face checkpoint folder (Qwen3 or Llama architecture) with its tokenizer."""

    path: str


# --- Rollout -------------------------------------------------------------------------------------


class SamplingConfig(Table, frozen=True, kw_only=True):
    """How tokens are drawn in training; evaluation is greedy."""

    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt = 64


class DrawnLengthsConfig(Table, frozen=True, kw_only=True):
    """Log-normal lengths, drawn per sequence: fixed work, for benchmarks."""

    median_tokens: PositiveInt
    p95_tokens: PositiveInt
    max_tokens: PositiveInt

    def __post_init__(self) -> None:
        if not self.median_tokens <= self.p95_tokens <= self.max_tokens:
            raise ValueError(
                f"median_tokens {self.median_tokens}, p95_tokens {self.p95_tokens} and max_tokens"
                f" {self.max_tokens} must not fall"
            )


class TorchEngineConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="torch"):
    """The embedded engine: continuous batching on CPU or CUDA."""

    max_running: PositiveInt = 128
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    deterministic: bool | Literal["auto"] = "auto"
    """A sequence gets the same tokens and log-probs, bit for bit, whatever runs beside it and
    wherever it is continued. ``auto``: on CPU, where it costs less than 1.5 times (``jigsaw bench
    determinism``), for models that can be run so; true refuses those that can't."""
    drawn_lengths: DrawnLengthsConfig | None = None
    """Benchmarks only: end each training sequence at a drawn length, and at no token."""


class RolloutConfig(Table, frozen=True, kw_only=True):
    """Rollout workers."""

    num_workers: NumProcesses = 1
    engine: TorchEngineConfig = TorchEngineConfig()
    sampling: SamplingConfig = SamplingConfig()


# --- Mode -----------------------------------------------------------------------------------------


class SyncConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="sync"):
    """A barrier between steps: the batch of a step is generated wholly by the version it trains."""


class AsyncConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="async"):
    """Generation and training at once, with bounded staleness (AReaL's rule)."""

    max_staleness: NonNegativeInt = 1
    """Versions that admission lets a batch lag behind; 0 gives the same steps as ``sync``."""
    sample_bound: NonNegativeInt | None = None
    """A sample with an older token is dropped as stale; None = `max_staleness`."""
    pipeline_depth: PositiveInt | None = None
    """Batches in flight at once, the one in training included; None = ``max_staleness + 1``."""
    keep_kv: bool = False
    """When weights land in mid-sequence, keep the keys and values that older weights computed
    instead of computing them again: faster, and less exact."""

    def __post_init__(self) -> None:
        if self.sample_bound is not None and self.sample_bound > self.max_staleness:
            raise ValueError(
                f"sample_bound {self.sample_bound} has no effect above max_staleness"
                f" {self.max_staleness}: no sample gets older than that"
            )
        if self.pipeline_depth is not None and self.pipeline_depth > self.max_staleness + 1:
            raise ValueError(
                f"pipeline_depth {self.pipeline_depth} has no effect above max_staleness + 1 ="
                f" {self.max_staleness + 1}: admission stops there"
            )


# --- Trainer -------------------------------------------------------------------------------------


class OptimizerConfig(Table, frozen=True, kw_only=True):
    """AdamW."""

    learning_rate: NonNegativeFloat = 1e-3
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    weight_decay: NonNegativeFloat = 0.0
    max_grad_norm: PositiveFloat = 1.0


class ConstantScheduleConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="constant"):
    """The learning rate after a linear rise."""

    warmup_steps: NonNegativeInt = 0


class LinearScheduleConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="linear"):
    """Linear rise, then linear fall to `final_fraction` of the learning rate at the last step."""

    warmup_steps: NonNegativeInt = 0
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0


class CosineScheduleConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="cosine"):
    """Linear rise, then half a cosine to `final_fraction` of the learning rate at the last step."""

    warmup_steps: NonNegativeInt = 0
    final_fraction: Annotated[float, Meta(ge=0, le=1)] = 0.0


class DynamicSamplingConfig(Table, frozen=True, kw_only=True):
    """Groups whose rewards are all equal are not trained; other prompts take their slots (DAPO).

    The reward service's rewards decide, before `OverlongConfig` shapes them."""

    max_batches: PositiveInt = 4
    """Groups filtered for one step, in batches, before `when_exhausted` applies."""
    when_exhausted: Literal["fail", "keep", "train_smaller"] = "fail"
    """``fail`` the pipeline, ``keep`` such groups for this step, or ``train_smaller``."""


class CheckpointConfig(Table, frozen=True, kw_only=True):
    """Checkpoints are written at version 0, every `every` versions and at the last."""

    every: PositiveInt = 10
    keep_last: PositiveInt = 2


class TrainerConfig(Table, frozen=True, kw_only=True):
    """The trainer."""

    num_steps: PositiveInt
    num_ranks: NumProcesses = 1
    """Processes that train together, each on its own device where there are enough."""
    groups_per_batch: PositiveInt = 16
    num_minibatches: PositiveInt = 1
    """Optimizer updates inside one step; more than 1 makes the clipping bind."""
    max_microbatch_tokens: PositiveInt = 8192
    """Padded tokens of one forward-backward."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig = (
        ConstantScheduleConfig()
    )
    checkpoint: CheckpointConfig = CheckpointConfig()
    dynamic_sampling: DynamicSamplingConfig | None = None
    control: Literal["permuted_rewards"] | None = None
    """A control experiment: ``permuted_rewards`` shuffles rewards within each batch, which must
    stop all learning."""

    def dynamic_sampling_spec(self) -> DynamicSamplingSpec | None:
        """What the scheduler needs to know of it."""
        sampling = self.dynamic_sampling
        if sampling is None:
            return None
        return DynamicSamplingSpec(
            max_batches=sampling.max_batches, when_exhausted=sampling.when_exhausted
        )

    def __post_init__(self) -> None:
        if self.num_minibatches > self.groups_per_batch:
            raise ValueError("num_minibatches must not exceed groups_per_batch")
        if self.schedule.warmup_steps >= self.num_steps:
            raise ValueError(
                f"schedule.warmup_steps {self.schedule.warmup_steps} must be below num_steps"
                f" {self.num_steps}, or the learning rate never reaches its value"
            )


class EvaluationConfig(Table, frozen=True, kw_only=True):
    """Greedy accuracy on the held-out set: before, after, and every `every` versions between."""

    enabled: bool = True
    every: PositiveInt | None = None
    max_running: PositiveInt = 256


# --- The whole -----------------------------------------------------------------------------------


class PipelineConfig(Table, frozen=True, kw_only=True):
    """One RL run."""

    name: str
    seed: NonNegativeInt = 0
    mode: SyncConfig | AsyncConfig = SyncConfig()
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: InitModelConfig | PathModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = GRPOConfig()
    trainer: TrainerConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    tracking: TrackingConfig | None = None

    def __post_init__(self) -> None:
        check_name(self.name, "name")
        overlong = self.algorithm.overlong
        max_new_tokens = self.rollout.sampling.max_new_tokens
        if overlong is not None and overlong.buffer_tokens > max_new_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens {overlong.buffer_tokens} exceeds"
                f" rollout.sampling.max_new_tokens {max_new_tokens}"
            )
        lengths = self.rollout.engine.drawn_lengths
        if lengths is not None and lengths.max_tokens > max_new_tokens:
            raise ValueError(
                f"rollout.engine.drawn_lengths.max_tokens {lengths.max_tokens} exceeds"
                f" rollout.sampling.max_new_tokens {max_new_tokens}"
            )
        if self.trainer.dynamic_sampling is not None and not self.algorithm.group_relative:
            raise ValueError(
                "trainer.dynamic_sampling filters groups with equal rewards, which teach nothing only"
                " where their own mean is the baseline: remove it or choose another algorithm.type"
            )
        if self.staleness()[1] > 0 and self.algorithm.correction is None:
            raise ValueError(
                'mode.type "async" trains samples of older versions, which is biased without'
                " algorithm.correction: add one, for example [algorithm.correction] type ="
                ' "truncate"'
            )

    def staleness(self) -> tuple[int, int, int]:
        """(max_staleness, sample_bound, pipeline_depth), defaults filled in."""
        if isinstance(self.mode, SyncConfig):
            return 0, 0, 1
        eta, bound, depth = (
            self.mode.max_staleness,
            self.mode.sample_bound,
            self.mode.pipeline_depth,
        )
        return eta, eta if bound is None else bound, eta + 1 if depth is None else depth

    def turns(self) -> TaskTurns:
        """How the task's environment takes part in a sequence."""
        return turns_of(self.task)

    def max_generated_tokens(self) -> int:
        """Of one sequence: each turn has a budget of its own."""
        return self.turns().num_turns * self.rollout.sampling.max_new_tokens

    def max_tokens_behind_prompt(self) -> int:
        """Of one sequence: all turns, and what the environment says between them."""
        turns = self.turns()
        return self.max_generated_tokens() + (turns.num_turns - 1) * turns.max_observation_tokens

    def spec(self, memory: MemorySpec | None = None) -> PipelineSpec:
        """What the scheduler needs to know; `memory` is for `jigsawrl.memory` to tell."""
        evaluation = EvaluationSpec(every=self.evaluation.every)
        staleness, bound, depth = self.staleness()
        return PipelineSpec(
            name=self.name,
            mode="sync" if isinstance(self.mode, SyncConfig) else "async",
            max_staleness=staleness,
            sample_bound=bound,
            pipeline_depth=depth,
            seed=self.seed,
            num_steps=self.trainer.num_steps,
            groups_per_batch=self.trainer.groups_per_batch,
            group_size=self.algorithm.group_size,
            min_group_size=self.algorithm.min_group_size,
            num_rollout_workers=self.rollout.num_workers,
            num_trainer_ranks=self.trainer.num_ranks,
            evaluation=evaluation if self.evaluation.enabled else None,
            dynamic_sampling=self.trainer.dynamic_sampling_spec(),
            device=self.device,
            terms=self.scheduling.terms(),
            memory=memory or MemorySpec(),
        )


_decoder = msgspec.msgpack.Decoder(PipelineConfig)


def encode_config(config: PipelineConfig) -> bytes:
    """The resolved config as it travels in `Configure`: without what is None, which is every key's
    default that may be. So a version that does not know a feature yet runs the pipelines that leave it
    off, and refuses the others by the name of the key."""
    return msgspec.msgpack.encode(_without_none(msgspec.to_builtins(config)))


def _without_none(table: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_none(value) if isinstance(value, dict) else value
        for key, value in table.items()
        if value is not None
    }


def decode_config(payload: bytes) -> PipelineConfig:
    """The resolved config; raises `msgspec.ValidationError` where it is none."""
    return _decoder.decode(payload)
