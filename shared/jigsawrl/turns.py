"""Turns within the tokens of a sequence: runs of generated tokens with what the environment said
between them. A position that nobody generated has version -1, so the versions tell where turns begin
and end.

The rollout engine, the reward service and the trainer's batches call it, each with the versions of a
`SequenceRecord` or of a part of it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby


def turn_spans(versions: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of the tokens of each turn; of an unfinished one those that are there."""
    spans: list[tuple[int, int]] = []
    end = 0
    for generated, run in groupby(versions, key=lambda version: version >= 0):
        begin, end = end, end + len(list(run))
        if generated:
            spans.append((begin, end))
    return spans


def current_turn(versions: Sequence[int]) -> tuple[int, int]:
    """(number, begin) of the turn that the next token belongs to, or of the last one where it has
    ended, the first turn being 0; `versions` begin behind the prompt."""
    spans = turn_spans(versions)
    if not versions or versions[-1] < 0:
        return len(spans), len(versions)
    return len(spans) - 1, spans[-1][0]
