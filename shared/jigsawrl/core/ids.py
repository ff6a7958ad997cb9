"""Ids of groups and sequences, their seeds, and compact sets of ids that have met their fate."""

from __future__ import annotations

import hashlib
from bisect import bisect_right

import msgspec


def group_id(pipeline: str, number: int) -> str:
    """``sort-digits/g12``."""
    return f"{pipeline}/g{number}"


def sequence_id(pipeline: str, number: int, index: int) -> str:
    """``sort-digits/g12/s3``."""
    return f"{pipeline}/g{number}/s{index}"


def parse_group(text: str) -> int | None:
    """The number of a group id; None where it is none."""
    digits = text.rpartition("/g")[2]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def parse_sequence(text: str) -> tuple[int, int] | None:
    """Number and index of a sequence id; None where it is none."""
    number, _, index = text.rpartition("/g")[2].partition("/s")
    if number.isascii() and number.isdigit() and index.isascii() and index.isdigit():
        return int(number), int(index)
    return None


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
