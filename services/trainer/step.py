"""One step: version v to v + 1 from the samples of one cut. Pure torch; the learner is the caller.

Shape letters: B sequences, T tokens, V vocabulary, N loss tokens of a micro-batch, row-major.

The loss of one update is ``sum w (c l + beta k)``: l from `objective` (which of ``.losses``), c from
``.correction`` (1 without one), k from ``.kl``, w from ``.aggregation``. With PPO, `critic` adds an
update of the critic to each of the policy.

The proximal policy is the one at the start of the step. With one mini-batch that is the current policy,
so its log-probs are those of the training pass, detached; with more they are computed once, before the
first update; or, on request, interpolated between engine and current policy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jigsawrl.algorithms.aggregation import Denominators, token_weights, weighted_sum
from jigsawrl.algorithms.correction import Correction, loglinear_proximal
from jigsawrl.algorithms.kl import kl_estimate
from jigsawrl.algorithms.logprobs import Filter, selected_logprobs
from jigsawrl.config import PipelineConfig
from jigsawrl.config_algorithm import AlgorithmConfig
from services.trainer.batch import MicroBatch, Sample, pack, split_minibatches, split_rows
from services.trainer.credit import group_numbers, token_advantages
from services.trainer.critic import CriticStep
from services.trainer.objective import behaviour_correction, policy_loss
from services.trainer.parallel import Gang, full
from services.trainer.spans import Spans


class NotFiniteError(Exception):
    """Loss or gradient is not finite; the optimizer was not stepped with it."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What does not change from step to step."""

    algorithm: AlgorithmConfig
    sampling: Filter
    max_new_tokens: int
    max_microbatch_tokens: int
    num_minibatches: int
    max_grad_norm: float

    @classmethod
    def of(cls, config: PipelineConfig) -> StepSettings:
        """What the step needs of a pipeline's config."""
        sampling = config.rollout.sampling
        return cls(
            algorithm=config.algorithm,
            sampling=Filter(
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
            ),
            max_new_tokens=config.max_generated_tokens(),
            max_microbatch_tokens=config.trainer.max_microbatch_tokens,
            num_minibatches=config.trainer.num_minibatches,
            max_grad_norm=config.trainer.optimizer.max_grad_norm,
        )


@dataclass(kw_only=True)
class _Sums:
    """What micro-batches add up to metrics; this rank's part."""

    surrogate: float = 0.0
    kl_loss: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    correction: float = 0.0
    bounded: float = 0.0
    num_tokens: float = 0.0
    grad_norms: list[float] = field(default_factory=list)


class Step:
    """Trains one cut."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        policy: Any,
        reference: Any | None,
        gang: Gang,
        settings: StepSettings,
        version: int,
        spans: Spans,
        critic: CriticStep | None = None,
        check_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._samples = samples
        self._policy = policy
        self._reference = reference
        self._gang = gang
        self._settings = settings
        self._version = version
        self._spans = spans
        self._check_stop = check_stop
        """Called between micro-batches; raises to abandon the step."""
        self._sums = _Sums()
        self._proximal: dict[int, Tensor] = {}
        self._reference_logprobs: dict[int, Tensor] = {}
        self._critic = critic
        self._groups = group_numbers(samples)
        self._advantages: Mapping[int, Tensor] = (
            dict(enumerate(token_advantages(samples, settings.algorithm)))
            if critic is None
            else {}  # come with the critic's values, when the step starts
        )

    @property
    def num_updates(self) -> int:
        """Done so far: while it is 0, weights and optimizer are those of before the step."""
        return len(self._sums.grad_norms)

    def train(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """All updates of the step; its metrics. Raises `NotFiniteError`."""
        minibatches = split_minibatches(self._samples, self._settings.num_minibatches)
        recompute = self._settings.algorithm.proximal == "recompute"
        if len(minibatches) > 1 and recompute:
            with self._spans.span("proximal_logprobs", version=self._version):
                self._proximal = self._logprobs(self._policy, minibatches)
        if self._reference is not None:
            with self._spans.span("reference_logprobs", version=self._version):
                self._reference_logprobs = self._logprobs(self._reference, minibatches)
        if self._critic is not None:
            # The same kind of pass as that of the proximal policy: what stands before any update.
            with self._spans.span("proximal_logprobs", version=self._version):
                micros = (micro for part in minibatches for micro in self._pack(part))
                self._advantages = self._critic.advantages(micros, self._check_stop)
        for minibatch in minibatches:
            self._zero_grad(optimizer)
            self.accumulate(minibatch)
            self._update(optimizer)
        self._zero_grad(optimizer)
        return self._metrics(len(minibatches))

    def accumulate(self, minibatch: Sequence[int]) -> None:
        """Add the gradients of one update, micro-batch by micro-batch."""
        denominators = self._denominators(minibatch)
        prompt_tokens = Counter[int]()
        for index in minibatch:
            prompt_tokens[self._groups[index]] += self._samples[index].num_loss_tokens
        for micro in self._pack(minibatch):
            self._check_stop()
            with self._spans.span(
                "forward_backward", version=self._version, num_tokens=micro.num_tokens
            ):
                weights_BT = token_weights(
                    micro.mask_BT,
                    aggregation=self._settings.algorithm.aggregation,
                    denominators=denominators,
                    prompt_tokens_B=torch.tensor(
                        # An empty micro-batch has one row of padding.
                        [prompt_tokens[self._groups[row]] for row in micro.rows] or [0]
                    ),
                )
                loss = self._loss(micro, weights_BT[micro.mask_BT])
                # FSDP averages gradients over ranks; the loss is a sum over them.
                (loss * self._gang.num_ranks).backward()
                if self._critic is not None:
                    self._critic.accumulate(micro, num_tokens=denominators.num_tokens)

    def _loss(self, micro: MicroBatch, weights_N: Tensor) -> Tensor:
        algorithm = self._settings.algorithm
        logprobs_N, entropy_N = self._forward(self._policy, micro)
        weights_N = weights_N.to(logprobs_N)
        lengths_B = [self._samples[row].num_loss_tokens for row in micro.rows]
        behaviour_N = self._behaviour(micro, logprobs_N)
        proximal_N = self._proximal_of(micro, logprobs_N.detach(), behaviour_N)
        surrogate = policy_loss(
            algorithm,
            logprobs_N,
            proximal_N=proximal_N,
            advantages_N=self._stored(self._advantages, micro, logprobs_N.detach()),
            lengths_B=lengths_B,
        )
        correction = behaviour_correction(
            algorithm, proximal_N=proximal_N, behaviour_N=behaviour_N, lengths_B=lengths_B
        )
        corrected_N = weights_N if correction is None else weights_N * correction.weights_N
        loss = weighted_sum(surrogate.loss_N, weights=corrected_N)
        sums = self._sums
        sums.surrogate += float(loss.detach())
        sums.clipped += float(surrogate.clipped_N.sum())
        sums.entropy += float(entropy_N.sum())
        sums.num_tokens += len(logprobs_N)
        self._add_distance(logprobs_N.detach(), proximal_N, behaviour_N, correction)
        if algorithm.kl is None:
            return loss
        kl_N = kl_estimate(
            logprobs_N,
            reference_N=self._stored(self._reference_logprobs, micro, logprobs_N.detach()),
            estimator=algorithm.kl.estimator,
        )
        kl_loss = algorithm.kl.coefficient * weighted_sum(kl_N, weights=weights_N)
        sums.kl += float(kl_N.detach().sum())
        sums.kl_loss += float(kl_loss.detach())
        return loss + kl_loss

    def _proximal_of(self, micro: MicroBatch, current_N: Tensor, behaviour_N: Tensor) -> Tensor:
        if self._settings.algorithm.proximal == "loglinear":
            versions = [self._samples[row].versions[self._samples[row].mask] for row in micro.rows]
            return loglinear_proximal(
                current_N,
                behaviour_N=behaviour_N,
                versions_N=torch.cat([torch.empty(0, dtype=torch.int32), *versions]).to(
                    current_N.device
                ),
                current_version=self._version + 1,  # the one being made
            )
        return self._stored(self._proximal, micro, current_N) if self._proximal else current_N

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """Step all optimizers or none."""
        with self._spans.span("optimizer", version=self._version):
            norm = torch.nn.utils.clip_grad_norm_(
                self._policy.parameters(), self._settings.max_grad_norm
            )
            grad_norm = float(full(norm))
            loss = float(self._gang.sum(self._floats(self._sums.surrogate + self._sums.kl_loss)))
            finite = math.isfinite(loss) and math.isfinite(grad_norm)
            found = f"loss {loss}, gradient norm {grad_norm}"
            if self._critic is not None:
                value_loss, value_norm = self._critic.gradient()
                finite = finite and math.isfinite(value_loss) and math.isfinite(value_norm)
                found += f", value loss {value_loss}, its gradient norm {value_norm}"
            if not finite:
                self._zero_grad(optimizer)
                raise NotFiniteError(found)
            optimizer.step()
            self._sums.grad_norms.append(grad_norm)
            if self._critic is not None:
                self._critic.update(value_norm)

    def _zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        if self._critic is not None:
            self._critic.zero_grad()

    def _forward(self, model: Any, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        tokens_BT = micro.tokens_BT.to(self._gang.device)
        logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
        rows_N, columns_N = micro.mask_BT.nonzero(as_tuple=True)
        logprobs_N, entropy_N = selected_logprobs(
            logits_BTV[rows_N, columns_N - 1],  # position t - 1 predicts token t
            tokens_N=tokens_BT[rows_N, columns_N],
            sampling=self._settings.sampling,
        )
        return logprobs_N, entropy_N

    @torch.no_grad()
    def _logprobs(self, model: Any, minibatches: list[list[int]]) -> dict[int, Tensor]:
        """Log-probs of the loss tokens of each of this rank's samples, packed as for training, so
        that a rank gets the samples that it trains."""
        logprobs: dict[int, Tensor] = {}
        for micro in (micro for indices in minibatches for micro in self._pack(indices)):
            self._check_stop()
            logprobs_N, _ = self._forward(model, micro)
            parts = split_rows(logprobs_N, micro, self._samples)
            logprobs.update(zip(micro.rows, parts, strict=True))
        return logprobs

    def _pack(self, indices: Sequence[int]) -> list[MicroBatch]:
        return pack(
            self._samples,
            indices,
            max_tokens=self._settings.max_microbatch_tokens,
            rank=self._gang.rank,
            num_ranks=self._gang.num_ranks,
        )

    def _denominators(self, minibatch: Sequence[int]) -> Denominators:
        lengths = [self._samples[index].num_loss_tokens for index in minibatch]
        return Denominators(
            num_tokens=sum(lengths),
            num_sequences=sum(length > 0 for length in lengths),
            num_prompts=len({self._groups[i] for i in minibatch if self._samples[i].mask.any()}),
            max_new_tokens=self._settings.max_new_tokens,
        )

    def _stored(self, values: Mapping[int, Tensor], micro: MicroBatch, like_N: Tensor) -> Tensor:
        """Values of each sample's loss tokens as [N], of the dtype and device of `like_N`."""
        parts = [values[row] for row in micro.rows]
        return torch.cat(parts).to(like_N) if parts else like_N.new_zeros(0)

    def _behaviour(self, micro: MicroBatch, like_N: Tensor) -> Tensor:
        parts = {row: self._samples[row].logprobs[self._samples[row].mask] for row in micro.rows}
        return self._stored(parts, micro, like_N)

    def _add_distance(
        self,
        current_N: Tensor,
        proximal_N: Tensor,
        behaviour_N: Tensor,
        correction: Correction | None,
    ) -> None:
        """How far the engine is from the policy at the start of the step; where that is interpolated,
        from the current one, since the interpolation would hide it."""
        interpolated = self._settings.algorithm.proximal == "loglinear"
        gap_N = (behaviour_N - (current_N if interpolated else proximal_N)).abs()
        if not len(gap_N):
            return
        self._sums.gap += float(gap_N.sum())
        self._sums.gap_max = max(self._sums.gap_max, float(gap_N.max()))
        if correction is not None:
            self._sums.correction += float(correction.weights_N.sum())
            self._sums.bounded += float(correction.bounded_N.sum())

    def _floats(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._gang.device)

    def _metrics(self, num_updates: int) -> dict[str, float]:
        sums = self._sums
        totals = self._gang.sum(
            self._floats(
                sums.surrogate,
                sums.kl_loss,
                sums.kl,
                sums.clipped,
                sums.entropy,
                sums.gap,
                sums.correction,
                sums.bounded,
                sums.num_tokens,
            )
        ).tolist()
        surrogate, kl_loss, kl, clipped, entropy, gap, weight, bounded, num_tokens = totals
        num_tokens = max(num_tokens, 1)
        metrics = {
            "loss": (surrogate + kl_loss) / num_updates,
            "policy_loss": surrogate / num_updates,
            "clip_fraction": clipped / num_tokens,
            "entropy": entropy / num_tokens,
            "grad_norm": sum(sums.grad_norms) / num_updates,
            "logprob_gap_mean": gap / num_tokens,
            "logprob_gap_max": float(self._gang.max(self._floats(sums.gap_max))),
        }
        if self._reference is not None:
            metrics["kl_loss"] = kl_loss / num_updates
            metrics["kl"] = kl / num_tokens
        if self._settings.algorithm.correction is not None:
            metrics["correction_weight_mean"] = weight / num_tokens
            metrics["correction_bounded_fraction"] = bounded / num_tokens
        if self._critic is not None:
            metrics |= self._critic.metrics()
        return metrics
