"""The ``[algorithm]`` table: ``type`` names the advantage estimator, and each further concern has a
table of its own: ``loss`` the policy loss, ``correction`` the weight of what another policy sampled,
``overlong`` reward shaping, ``kl`` the reference, ``critic`` (with PPO) the value model.

Read by `jigsawrl.config`. The formulas and their sources are in `jigsawrl.algorithms`; the trainer
brings both together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from jigsawrl.config_base import (
    Fraction,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Table,
)

AtLeastOne = Annotated[float, Meta(ge=1)]
UnitInterval = Annotated[float, Meta(ge=0, le=1)]

# --- Policy loss ---------------------------------------------------------------------------------


class PPOClipConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="ppo_clip"):
    """PPO's clipped surrogate, per token; a larger `clip_high` is DAPO's clip-higher."""

    clip_low: Fraction = 0.2
    clip_high: PositiveFloat = 0.2
    dual_clip: Annotated[float, Meta(gt=1)] | None = None
    """The loss of a token with a negative advantage A is at most this times ``-A``."""


class GSPOConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="gspo"):
    """The clipped surrogate with one ratio per sequence; needs ``seq_mean_token_mean``."""

    clip_low: Fraction = 3e-4
    clip_high: PositiveFloat = 4e-4
    """The paper's bounds: a sequence's ratio is a geometric mean, which hardly moves."""


class CISPOConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="cispo"):
    """REINFORCE weighted by the clipped, detached ratio: no token loses its gradient."""

    clip_low: Fraction = 1.0
    """1 = no lower bound, as in the paper."""
    clip_high: PositiveFloat = 0.2


# --- Correction of the behaviour policy ----------------------------------------------------------


class TruncateConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="truncate"):
    """Truncated importance sampling: weights above `cap` become `cap`."""

    level: Literal["token", "sequence"] = "token"
    """``sequence``: all tokens of a sequence share the product of their weights."""
    cap: AtLeastOne = 2.0


class IcePopConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="icepop"):
    """Tokens whose weight lies outside [low, high] are left out; the others keep theirs."""

    low: UnitInterval = 0.5
    high: AtLeastOne = 5.0


class SequenceMaskConfig(Table, frozen=True, kw_only=True, tag_field="type", tag="sequence_mask"):
    """Sequences whose gate lies outside [low, high] are left out; in the others each token keeps its
    own weight."""

    gate: Literal["geometric_mean", "product"]
    """Of the weights of the sequence's tokens."""
    low: UnitInterval
    high: AtLeastOne
    cap: AtLeastOne | None = None
    """Upper bound of the weights of tokens that stay."""


# --- Rewards, reference, critic ------------------------------------------------------------------


class OverlongConfig(Table, frozen=True, kw_only=True):
    """DAPO's soft punishment: over the last `buffer_tokens` before ``max_new_tokens`` the reward falls
    linearly, by `factor` at the end."""

    buffer_tokens: PositiveInt
    factor: PositiveFloat = 1.0


class KLConfig(Table, frozen=True, kw_only=True):
    """KL penalty to the reference model (the weights of version 0), added to the loss."""

    coefficient: PositiveFloat
    estimator: Literal["k1", "k2", "k3"] = "k3"


class CriticConfig(Table, frozen=True, kw_only=True):
    """The value model: a copy of version 0's backbone with a linear head. Betas, weight decay, norm
    bound and schedule are those of ``[trainer]``."""

    learning_rate: NonNegativeFloat = 1e-3
    value_clip: PositiveFloat = 0.5
    """How far a value may move in one step before its loss stops falling."""


# --- The algorithms ------------------------------------------------------------------------------


class AlgorithmTable(Table, frozen=True, kw_only=True):
    """What all algorithms have."""

    group_size: Annotated[int, Meta(ge=2)] = 8
    """Samples per prompt."""
    aggregation: Literal[
        "token_mean",
        "token_sum",
        "seq_mean_token_sum",
        "seq_mean_token_sum_norm",
        "seq_mean_token_mean",
        "prompt_mean",
    ] = "token_mean"
    loss: PPOClipConfig | GSPOConfig | CISPOConfig = PPOClipConfig()
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Log-probs of the policy that the ratio is taken against: by a forward pass where the training
    pass does not have them anyway, or interpolated between engine and current policy."""
    correction: TruncateConfig | IcePopConfig | SequenceMaskConfig | None = None
    """None: no weight for the distance between proximal and behaviour policy."""
    overlong: OverlongConfig | None = None
    kl: KLConfig | None = None

    def __post_init__(self) -> None:
        if isinstance(self.loss, GSPOConfig) and self.aggregation != "seq_mean_token_mean":
            raise ValueError(
                'loss.type = "gspo" is a mean over sequences: set aggregation ='
                ' "seq_mean_token_mean"'
            )

    @property
    def min_group_size(self) -> int:
        """Survivors below which a group teaches nothing: a baseline from siblings needs one."""
        return 2

    @property
    def group_relative(self) -> bool:
        """Whether equal rewards in a group make all its advantages 0 (before whitening)."""
        return True


class GRPOConfig(AlgorithmTable, frozen=True, kw_only=True, tag_field="type", tag="grpo"):
    """Group-relative policy optimisation. Dr. GRPO is ``normalization = "mean_only"`` with
    ``aggregation = "seq_mean_token_sum_norm"``."""

    normalization: Literal["group_std", "batch_std", "mean_only"] = "group_std"
    """What a reward minus its group's mean is divided by."""


class RLOOConfig(AlgorithmTable, frozen=True, kw_only=True, tag_field="type", tag="rloo"):
    """REINFORCE with the mean of the other samples of the group as baseline."""


class ReinforcePlusPlusConfig(
    AlgorithmTable, frozen=True, kw_only=True, tag_field="type", tag="reinforce_plus_plus"
):
    """Discounted returns, whitened over the tokens of the batch."""

    group_size: PositiveInt = 8
    gamma: Fraction = 1.0
    """Discount per token."""

    @property
    def min_group_size(self) -> int:
        """One: the baseline is the batch's."""
        return 1

    @property
    def group_relative(self) -> bool:
        """No: the baseline is the batch's."""
        return False


class ReinforcePlusPlusBaselineConfig(
    AlgorithmTable, frozen=True, kw_only=True, tag_field="type", tag="reinforce_plus_plus_baseline"
):
    """Rewards minus their group's mean, whitened over the tokens of the batch."""


class PPOConfig(AlgorithmTable, frozen=True, kw_only=True, tag_field="type", tag="ppo"):
    """A critic and generalised advantage estimation, whitened over the tokens of the batch."""

    group_size: PositiveInt = 8
    gamma: Fraction = 1.0
    """Discount per token."""
    gae_lambda: UnitInterval = 0.95
    critic: CriticConfig = CriticConfig()

    @property
    def min_group_size(self) -> int:
        """One: the baseline is the critic's."""
        return 1

    @property
    def group_relative(self) -> bool:
        """No: the baseline is the critic's."""
        return False


AlgorithmConfig = (
    GRPOConfig | RLOOConfig | ReinforcePlusPlusConfig | ReinforcePlusPlusBaselineConfig | PPOConfig
)
