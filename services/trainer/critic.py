"""PPO's critic and what one step does with it: values before the first update, advantages from them,
and a clipped value loss beside each policy update. The learner builds both, the step calls.

Shape letters: B sequences, T tokens, N loss tokens of a micro-batch, row-major.

The critic is a model of its own: a backbone of the policy's shape, filled from version 0, with a linear
head that starts at 0 (so the first advantages are the returns). It has an optimizer of its own. A head
on the policy's backbone would be cheaper, but would pull the policy with the value loss and share one
gradient norm between both. The value of the state in which token t is chosen is read at position t - 1,
where the policy predicts t. The value loss is a mean over the loss tokens of the update, whatever the
policy's aggregation, and has no behaviour weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jigsawrl.algorithms.advantages import whiten
from jigsawrl.algorithms.aggregation import weighted_sum
from jigsawrl.algorithms.returns import gae
from jigsawrl.algorithms.values import clipped_value_loss
from jigsawrl.config_algorithm import PPOConfig
from jigsawrl.models.loading import model_from_config
from services.trainer.batch import MicroBatch, Sample, split_rows
from services.trainer.parallel import Gang, full


class Critic(nn.Module):
    """Tokens [B, T] to values [B, T] in float32 at least."""

    def __init__(self, backbone: Any, hidden_size: int) -> None:
        super().__init__()
        self.model = backbone
        self.head = nn.Linear(hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden_BTH = self.model(input_ids=input_ids, use_cache=False).last_hidden_state
        # A clone, since FSDP hooks the output and warns of one that is a view.
        values_BT: Tensor = self.head(hidden_BTH).squeeze(-1).clone()
        return values_BT.float() if values_BT.dtype == torch.bfloat16 else values_BT


def build_critic(model_config: str, *, dtype: torch.dtype) -> Critic:
    """A critic for policies with this ``config.json`` text; its backbone's weights are arbitrary."""
    policy = model_from_config(model_config, dtype=dtype)
    return Critic(policy.model, policy.config.hidden_size).to(dtype)


def backbone_state(policy_state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a policy's whole weights those of its backbone, which its critic starts from."""
    prefix = "model."
    return {
        name.removeprefix(prefix): value
        for name, value in policy_state.items()
        if name.startswith(prefix)
    }


@dataclass(kw_only=True)
class _Sums:
    """This rank's part."""

    loss: float = 0.0
    clipped: float = 0.0
    values: float = 0.0
    num_tokens: float = 0.0


class CriticStep:
    """The critic's part of one step; the step calls `advantages` once, then `accumulate` for each
    micro-batch, and `gradient` and `update` for each update."""

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        critic: Any,
        optimizer: torch.optim.Optimizer,
        gang: Gang,
        algorithm: PPOConfig,
        max_grad_norm: float,
    ) -> None:
        self._samples = samples
        self._critic = critic
        self._optimizer = optimizer
        self._gang = gang
        self._algorithm = algorithm
        self._max_grad_norm = max_grad_norm
        self._old_values: dict[int, Tensor] = {}
        self._returns: dict[int, Tensor] = {}
        self._sums = _Sums()
        self._grad_norms: list[float] = []

    @torch.no_grad()
    def advantages(
        self, micros: Iterable[MicroBatch], check_stop: Callable[[], None]
    ) -> dict[int, Tensor]:
        """Whitened float64 advantages of the loss tokens of this rank's samples, which are those of
        `micros`: all that it trains in this step."""
        advantages: dict[int, Tensor] = {}
        for micro in micros:
            check_stop()
            values = split_rows(self._values(micro), micro, self._samples)
            for row, values_T in zip(micro.rows, values, strict=True):
                own = gae(
                    self._samples[row].reward,
                    values_T=values_T,
                    gamma=self._algorithm.gamma,
                    gae_lambda=self._algorithm.gae_lambda,
                )
                advantages[row] = own
                self._old_values[row] = values_T
                self._returns[row] = (own + values_T.cpu().double()).to(values_T)
        flat = torch.cat([torch.empty(0, dtype=torch.float64), *advantages.values()])
        whitened = whiten(
            flat.to(self._gang.device),
            sum_over_ranks=self._gang.sum,
            max_over_ranks=self._gang.max,
        ).cpu()
        lengths = [len(own) for own in advantages.values()]
        return dict(zip(advantages, torch.split(whitened, lengths), strict=True)) if lengths else {}

    def zero_grad(self) -> None:
        """Forget gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def accumulate(self, micro: MicroBatch, *, num_tokens: int) -> None:
        """Add the gradients of one micro-batch of an update with `num_tokens` loss tokens in all."""
        values_N = self._values(micro)
        rows = micro.rows
        empty = values_N.new_empty(0).detach()
        loss = clipped_value_loss(
            values_N,
            old_values_N=torch.cat([empty, *(self._old_values[row] for row in rows)]),
            returns_N=torch.cat([empty, *(self._returns[row] for row in rows)]),
            clip=self._algorithm.critic.value_clip,
        )
        weights_N = torch.full_like(values_N, 1 / max(num_tokens, 1)).detach()
        total = weighted_sum(loss.loss_N, weights=weights_N)
        self._sums.loss += float(total.detach())
        self._sums.clipped += float(loss.clipped_N.sum())
        self._sums.values += float(values_N.detach().sum())
        self._sums.num_tokens += len(values_N)
        # FSDP averages gradients over ranks; the loss is a sum over them.
        (total * self._gang.num_ranks).backward()

    def gradient(self) -> tuple[float, float]:
        """(loss so far in this step, gradient norm of this update); clips the gradients."""
        norm = torch.nn.utils.clip_grad_norm_(self._critic.parameters(), self._max_grad_norm)
        return float(self._gang.sum(self._floats(self._sums.loss))), float(full(norm))

    def update(self, grad_norm: float) -> None:
        """Step the critic's optimizer."""
        self._optimizer.step()
        self._grad_norms.append(grad_norm)

    def metrics(self) -> dict[str, float]:
        """Over the whole step and all ranks."""
        sums = self._sums
        totals = self._floats(sums.loss, sums.clipped, sums.values, sums.num_tokens)
        loss, clipped, values, num_tokens = self._gang.sum(totals).tolist()
        num_updates = max(len(self._grad_norms), 1)
        num_tokens = max(num_tokens, 1)
        return {
            "value_loss": loss / num_updates,
            "value_clip_fraction": clipped / num_tokens,
            "value_mean": values / num_tokens,
            "value_grad_norm": sum(self._grad_norms) / num_updates,
        }

    def _values(self, micro: MicroBatch) -> Tensor:
        values_BT = self._critic(micro.tokens_BT.to(self._gang.device))
        rows_N, columns_N = micro.mask_BT.nonzero(as_tuple=True)
        values_N: Tensor = values_BT[rows_N, columns_N - 1]
        return values_N

    def _floats(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self._gang.device)
