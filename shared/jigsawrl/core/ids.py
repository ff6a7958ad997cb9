"""Ids of groups and sequences, their seeds, and compact sets of ids that have met their fate."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_right

import msgspec

_DIGITS = re.compile(r"[0-9]{1,15}")
"""Of an id: longer ones are no ids of ours, and Python refuses to read very long ones."""


def group_id(pipeline: str, number: int) -> str:
    """``sort-digits/g12``."""
    return f"{pipeline}/g{number}"


def sequence_id(pipeline: str, number: int, index: int) -> str:
    """``sort-digits/g12/s3``."""
    return f"{pipeline}/g{number}/s{index}"


def parse_group(pipeline: str, text: str) -> int | None:
    """The number of a group id of the pipeline; None where it is none."""
    name, _, digits = text.rpartition("/g")
    return _number(digits) if name == pipeline else None


def parse_sequence(pipeline: str, text: str) -> tuple[int, int] | None:
    """Number and index of a sequence id of the pipeline; None where it is none."""
    group, _, digits = text.rpartition("/s")
    number, index = parse_group(pipeline, group), _number(digits)
    return None if number is None or index is None else (number, index)


def _number(digits: str) -> int | None:
    return int(digits) if _DIGITS.fullmatch(digits) else None


def sequence_seed(seed: int, cursor: int, index: int) -> int:
    """63 bits from (pipeline seed, prompt, sample): a sequence that is placed again, or a prompt that
    returns after a rollback, draws the same numbers."""
    digest = hashlib.sha256(f"{seed}/{cursor}/{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class IdRanges(msgspec.Struct):
    """A set of integers as sorted, disjoint, half-open ranges: ids that end in order cost nothing."""

    ranges: list[tuple[int, int]] = []
    count: int = 0

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.ranges, (number, _INFINITY)) - 1
        return at >= 0 and number < self.ranges[at][1]

    def __len__(self) -> int:
        return self.count

    def add(self, number: int) -> None:
        """Put one number in; it must not be there."""
        assert number not in self
        at = bisect_right(self.ranges, (number, _INFINITY))
        start, stop = number, number + 1
        if at < len(self.ranges) and self.ranges[at][0] == stop:
            stop = self.ranges.pop(at)[1]
        if at > 0 and self.ranges[at - 1][1] == start:
            at -= 1
            start = self.ranges.pop(at)[0]
        self.ranges.insert(at, (start, stop))
        self.count += 1

    def remove(self, number: int) -> None:
        """Take one number out; it must be there."""
        assert number in self
        at = bisect_right(self.ranges, (number, _INFINITY)) - 1
        start, stop = self.ranges.pop(at)
        pieces = [(start, number), (number + 1, stop)]
        self.ranges[at:at] = [piece for piece in pieces if piece[0] < piece[1]]
        self.count -= 1

    def numbers(self) -> list[int]:
        """All of them, in order."""
        return [number for start, stop in self.ranges for number in range(start, stop)]


_INFINITY = 1 << 63
