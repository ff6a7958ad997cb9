"""One step: version v to v + 1 from the samples of one cut. Pure torch; the learner is the caller.

Shape letters: B sequences, T tokens, V vocabulary, N loss tokens of a micro-batch, row-major.

The loss of one update is ``sum w (l + beta k)``: l from `jigsawrl.algorithms.losses`, k from ``.kl``,
w from ``.aggregation``. The proximal policy is the one at the start of the step. With one mini-batch
that is the current policy, so its log-probs are those of the training pass, detached; with more they
are computed once, before the first update.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jigsawrl.algorithms.advantages import group_advantages
from jigsawrl.algorithms.aggregation import Denominators, token_weights, weighted_sum
from jigsawrl.algorithms.kl import kl_estimate
from jigsawrl.algorithms.logprobs import Filter, selected_logprobs
from jigsawrl.algorithms.losses import clipped_surrogate
from jigsawrl.config import GRPOConfig
from services.trainer.batch import MicroBatch, Sample, pack, split_minibatches
from services.trainer.parallel import Gang, full
from services.trainer.spans import Spans


class NotFiniteError(Exception):
    """Loss or gradient is not finite; the optimizer was not stepped with it."""


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """What does not change from step to step."""

    algorithm: GRPOConfig
    sampling: Filter
    max_new_tokens: int
    max_microbatch_tokens: int
    num_minibatches: int
    max_grad_norm: float


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
        numbers = {group: i for i, group in enumerate(dict.fromkeys(s.group for s in samples))}
        self._advantages_B = group_advantages(
            torch.tensor([sample.reward for sample in samples], dtype=torch.float64),
            groups_B=torch.tensor([numbers[sample.group] for sample in samples]),
            normalization=settings.algorithm.normalization,
        )

    def train(self, optimizer: torch.optim.Optimizer) -> dict[str, float]:
        """All updates of the step; its metrics. Raises `NotFiniteError`."""
        minibatches = split_minibatches(self._samples, self._settings.num_minibatches)
        if len(minibatches) > 1:
            with self._spans.span("proximal_logprobs", version=self._version):
                self._proximal = self._logprobs(self._policy, minibatches)
        if self._reference is not None:
            with self._spans.span("reference_logprobs", version=self._version):
                self._reference_logprobs = self._logprobs(self._reference, minibatches)
        for minibatch in minibatches:
            optimizer.zero_grad(set_to_none=True)
            self.accumulate(minibatch)
            self._update(optimizer)
        optimizer.zero_grad(set_to_none=True)
        return self._metrics(len(minibatches))

    def accumulate(self, minibatch: Sequence[int]) -> None:
        """Add the gradients of one update, micro-batch by micro-batch."""
        denominators = self._denominators(minibatch)
        for micro in self._pack(minibatch):
            self._check_stop()
            with self._spans.span(
                "forward_backward", version=self._version, num_tokens=micro.num_tokens
            ):
                loss = self._loss(micro, denominators)
                # FSDP averages gradients over ranks; the loss is a sum over them.
                (loss * self._gang.num_ranks).backward()

    def _loss(self, micro: MicroBatch, denominators: Denominators) -> Tensor:
        algorithm = self._settings.algorithm
        logprobs_N, entropy_N = self._forward(self._policy, micro)
        kept_BT = micro.mask_BT
        weights_N = token_weights(
            kept_BT, aggregation=algorithm.aggregation, denominators=denominators
        )[kept_BT].to(logprobs_N)
        advantages_B = self._advantages_B[list(micro.rows)]
        lengths_B = kept_BT.sum(dim=1)[: len(micro.rows)]
        advantages_N = advantages_B.repeat_interleave(lengths_B).to(logprobs_N)
        detached_N = logprobs_N.detach()
        proximal_N = (
            self._stored(self._proximal, micro, detached_N) if self._proximal else detached_N
        )
        surrogate = clipped_surrogate(
            logprobs_N,
            proximal_N=proximal_N,
            advantages_N=advantages_N,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
        )
        policy_loss = weighted_sum(surrogate.loss_N, weights=weights_N)
        sums = self._sums
        sums.surrogate += float(policy_loss.detach())
        sums.clipped += float(surrogate.clipped_N.sum())
        sums.entropy += float(entropy_N.sum())
        sums.num_tokens += len(logprobs_N)
        self._add_gap(micro, proximal_N)
        if algorithm.kl is None:
            return policy_loss
        kl_N = kl_estimate(
            logprobs_N,
            reference_N=self._stored(self._reference_logprobs, micro, detached_N),
            estimator=algorithm.kl.estimator,
        )
        kl_loss = algorithm.kl.coefficient * weighted_sum(kl_N, weights=weights_N)
        sums.kl += float(kl_N.detach().sum())
        sums.kl_loss += float(kl_loss.detach())
        return policy_loss + kl_loss

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        with self._spans.span("optimizer", version=self._version):
            grad_norm = float(
                full(
                    torch.nn.utils.clip_grad_norm_(
                        self._policy.parameters(), self._settings.max_grad_norm
                    )
                )
            )
            loss = float(self._gang.sum(self._floats(self._sums.surrogate + self._sums.kl_loss)))
            if not math.isfinite(loss) or not math.isfinite(grad_norm):
                optimizer.zero_grad(set_to_none=True)
                raise NotFiniteError(f"loss {loss}, gradient norm {grad_norm}")
            optimizer.step()
            self._sums.grad_norms.append(grad_norm)

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
            lengths = [self._samples[row].num_loss_tokens for row in micro.rows]
            parts = logprobs_N.split(lengths) if lengths else ()
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
            max_new_tokens=self._settings.max_new_tokens,
        )

    def _stored(self, logprobs: dict[int, Tensor], micro: MicroBatch, like_N: Tensor) -> Tensor:
        if not micro.rows:
            return torch.zeros_like(like_N)
        return torch.cat([logprobs[row] for row in micro.rows])

    def _add_gap(self, micro: MicroBatch, proximal_N: Tensor) -> None:
        """How far engine and trainer are apart at the start of the step, which is what was sampled."""
        if not len(proximal_N):
            return
        engine_N = torch.cat(
            [self._samples[row].logprobs[self._samples[row].mask] for row in micro.rows]
        ).to(proximal_N)
        gap_N = (engine_N - proximal_N).abs()
        self._sums.gap += float(gap_N.sum())
        self._sums.gap_max = max(self._sums.gap_max, float(gap_N.max()))

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
                sums.num_tokens,
            )
        ).tolist()
        surrogate, kl_loss, kl, clipped, entropy, gap, num_tokens = totals
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
        return metrics
