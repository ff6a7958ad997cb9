"""Rewards that depend on length.

DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), with limit L, buffer b and factor f:

    min(-(length - (L - b)) / b * f, 0)

as in verl's DAPO reward manager and AReaL's ``reward_overlong_penalty``; `length` counts generated
tokens. Deviation from the paper: none beyond L, since generation stops there.
"""

from __future__ import annotations


def overlong_penalty(
    num_tokens: int, *, max_tokens: int, buffer_tokens: int, factor: float
) -> float:
    """Added to the reward: 0 up to ``max_tokens - buffer_tokens``, -`factor` at `max_tokens`."""
    over = num_tokens - (max_tokens - buffer_tokens)
    return min(-over / buffer_tokens * factor, 0.0)
