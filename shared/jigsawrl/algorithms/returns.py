"""From the reward of a finished sequence to a return or an advantage per token.

Shape letters: T loss tokens of one sequence, in order.

Only loss tokens count as steps: what lies between them (another turn's prompt, a tool's answer) is
skipped, neither discounted nor valued, as in verl's and AReaL's GAE, which carry the running value over
masked positions. The reward comes with the last loss token; all others have reward 0.

- ``discounted_returns``  G_t = gamma^(T-1-t) R, what REINFORCE++ (Hu et al., arXiv:2501.03262) whitens
- ``gae``  d_t = r_t + gamma V_(t+1) - V_t,  A_t = d_t + gamma lambda A_(t+1)  (Schulman et al.,
  arXiv:1506.02438, eq. 16), with V_T = A_T = 0

Deviations: the end of a sequence is always terminal, also where it was cut at the length limit (AReaL
takes the last value there): its reward is the final one. KL is part of the loss, not of the rewards.
"""

from __future__ import annotations

import torch
from torch import Tensor


def discounted_returns(reward: float, *, num_tokens: int, gamma: float) -> Tensor:
    """Returns float64 [T], T = `num_tokens`."""
    steps_to_end = torch.arange(num_tokens - 1, -1, -1, dtype=torch.float64)
    return reward * gamma**steps_to_end


def gae(reward: float, *, values_T: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Advantages float64 [T] for `values_T` [T], the values before each loss token is chosen.

    The critic's targets are these plus `values_T`."""
    values = values_T.detach().double().tolist()
    advantages = [0.0] * len(values)
    following_value, following_advantage = 0.0, 0.0
    immediate = reward
    for t in range(len(values) - 1, -1, -1):
        delta = immediate + gamma * following_value - values[t]
        following_advantage = delta + gamma * gae_lambda * following_advantage
        following_value = values[t]
        immediate = 0.0
        advantages[t] = following_advantage
    return torch.tensor(advantages, dtype=torch.float64)
