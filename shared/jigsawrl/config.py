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

from jigsawrl.contract.spec import EvaluationSpec, PipelineSpec
from jigsawrl.contract.streams import check_name

PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all config tables."""


# --- Model ---------------------------------------------------------------------------------------


class WarmupConfig(Table, frozen=True, kw_only=True):
    """Supervised steps on task samples before RL, until the model solves a share of fresh ones."""

    target_accuracy: Fraction = 0.5
    """Stops when this share of the latest fresh samples is solved greedily before being trained on."""
    learning_rate: PositiveFloat = 3e-3
    batch_size: PositiveInt = 64
    max_steps: PositiveInt = 4000


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


# --- Task ----------------------------------------------------------------------------------------


class SortDigitsConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="sort-digits"):
    """Prompt ``3142=``, answer ``1234``: sort digits (repeats allowed). Reward 1 if exact."""

    min_digits: PositiveInt = 4
    max_digits: PositiveInt = 8
    num_held_out: PositiveInt = 500

    def __post_init__(self) -> None:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits {self.min_digits} exceeds max_digits {self.max_digits}")


class JsonlTaskConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="jsonl"):
    """One JSON object a line with ``prompt``, ``answer`` and any other fields."""

    path: str
    reward: Literal["exact", "numeric"]
    held_out_fraction: Annotated[float, Meta(gt=0, lt=1)] = 0.1
    """Share of the lines that are kept for evaluation, chosen by a hash of the prompt."""


class ReasoningGymConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="reasoning-gym"):
    """One family of the reasoning-gym package, scored by its own scorer."""

    family: Literal["basic_arithmetic", "chain_sum", "number_sorting"]
    options: dict[str, Any] = {}
    """Passed to the family's own config."""
    num_held_out: PositiveInt = 200


TaskConfig = SortDigitsConfig | JsonlTaskConfig | ReasoningGymConfig


# --- Rollout -------------------------------------------------------------------------------------


class SamplingConfig(Table, frozen=True, kw_only=True):
    """How tokens are drawn in training; evaluation is greedy."""

    temperature: PositiveFloat = 1.0
    top_p: Fraction = 1.0
    top_k: PositiveInt | None = None
    max_new_tokens: PositiveInt = 64


class TorchEngineConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="torch"):
    """The embedded engine: continuous batching on CPU or CUDA."""

    max_running: PositiveInt = 128
    """Sequences decoded together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    deterministic: bool = False
    """A sequence gets the same tokens and log-probs, bit for bit, whatever runs beside it and
    wherever it is continued. Off until its cost is measured on a quiet machine
    (``jigsaw bench determinism``): it is to be the default where that is under 1.5 times."""


class RolloutConfig(Table, frozen=True, kw_only=True):
    """Rollout workers."""

    num_workers: PositiveInt = 1
    engine: TorchEngineConfig = TorchEngineConfig()
    sampling: SamplingConfig = SamplingConfig()


# --- Algorithm -----------------------------------------------------------------------------------


class KLConfig(Table, frozen=True, kw_only=True):
    """KL penalty to the reference model (the weights of version 0), added to the loss."""

    coefficient: PositiveFloat
    estimator: Literal["k1", "k2", "k3"] = "k3"


class GRPOConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="grpo"):
    """Group-relative policy optimisation."""

    group_size: Annotated[int, Meta(ge=2)] = 8
    normalization: Literal["group_std", "batch_std", "mean_only"] = "group_std"
    """What a reward minus its group's mean is divided by."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    clip_low: PositiveFloat = 0.2
    clip_high: PositiveFloat = 0.2
    kl: KLConfig | None = None


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


class CheckpointConfig(Table, frozen=True, kw_only=True):
    """Checkpoints are written at version 0, every `every` versions and at the last."""

    every: PositiveInt = 10
    keep_last: PositiveInt = 2


class TrainerConfig(Table, frozen=True, kw_only=True):
    """The trainer."""

    num_steps: PositiveInt
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
    control: Literal["permuted_rewards"] | None = None
    """A control experiment: ``permuted_rewards`` shuffles rewards within each batch, which must
    stop all learning."""

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

    every: PositiveInt | None = None
    max_running: PositiveInt = 256


# --- The whole -----------------------------------------------------------------------------------


class PipelineConfig(Table, frozen=True, kw_only=True):
    """One RL run."""

    name: str
    seed: NonNegativeInt = 0
    mode: Literal["sync"] = "sync"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: InitModelConfig | PathModelConfig
    task: TaskConfig
    rollout: RolloutConfig = RolloutConfig()
    algorithm: GRPOConfig = GRPOConfig()
    trainer: TrainerConfig
    evaluation: EvaluationConfig | None = EvaluationConfig()

    def __post_init__(self) -> None:
        check_name(self.name, "name")

    def spec(self) -> PipelineSpec:
        """What the scheduler needs to know."""
        evaluation = (
            None if self.evaluation is None else EvaluationSpec(every=self.evaluation.every)
        )
        return PipelineSpec(
            name=self.name,
            mode=self.mode,
            seed=self.seed,
            num_steps=self.trainer.num_steps,
            groups_per_batch=self.trainer.groups_per_batch,
            group_size=self.algorithm.group_size,
            min_group_size=2,
            num_rollout_workers=self.rollout.num_workers,
            evaluation=evaluation,
            device=self.device,
        )


_decoder = msgspec.msgpack.Decoder(PipelineConfig)


def encode_config(config: PipelineConfig) -> bytes:
    """The resolved config as it travels in `Configure`."""
    return msgspec.msgpack.encode(config)


def decode_config(payload: bytes) -> PipelineConfig:
    """The resolved config; raises `msgspec.ValidationError` where it is none."""
    return _decoder.decode(payload)
