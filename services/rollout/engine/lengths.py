"""Lengths drawn by law, for benchmarks: every turn of a sequence ends where its seed says, whatever
the model would do, so that the same work is done under any policy and any weights.

Called by `torch_engine`; nothing outside the engine sees a length before the turn has ended."""

from __future__ import annotations

import math
from statistics import NormalDist

import msgspec
import torch

from services.rollout.engine.sampling import uniforms

POSITION = 2**40
"""Of the random number that gives the length of the first turn, later ones behind it: no token stands
there."""


class DrawnLengths(msgspec.Struct, frozen=True, kw_only=True):
    """A log-normal law, cut off at both ends."""

    median_tokens: int
    p95_tokens: int
    max_tokens: int

    def of(self, seed: int, *, turn: int = 0) -> int:
        """New tokens of a turn of the sequence with this seed, at least 1."""
        sigma = math.log(self.p95_tokens / self.median_tokens) / NormalDist().inv_cdf(0.95)
        draw = float(uniforms([seed], torch.tensor([[POSITION + turn]]))[0, 0])
        normal = NormalDist().inv_cdf(max(draw, 1e-12))
        length = round(self.median_tokens * math.exp(sigma * normal))
        return max(1, min(length, self.max_tokens))
