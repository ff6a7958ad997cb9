"""Sequences that wait for a free slot, and which of them join first. Called by `torch_engine`; what is
computed never depends on it, since the draws of a sequence depend on its own seed alone.

Longest first: Seer (arXiv 2511.14617), context-aware scheduling. The samples of a group tend to be of
similar length, so one of each group, its probe, goes ahead of all others; then those of the group with
the longest sample so far, so that what takes longest is not begun last. Deviations: the length of a
probe that still runs counts as it stands (Seer: as the limit), and nothing is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from services.rollout.engine.base import SequenceStart


def longest_first(
    starts: Sequence[SequenceStart], *, ended: Mapping[str, int], running: Mapping[str, int]
) -> list[SequenceStart]:
    """In the order of joining. `ended` and `running` are by group the most new tokens of one of its
    sequences. Equals keep their order; a sequence that moved here counts at least its tokens."""
    known = {*ended, *running}
    probes: list[SequenceStart] = []
    others: list[SequenceStart] = []
    for start in starts:
        (others if start.group in known else probes).append(start)
        known.add(start.group)

    def length(start: SequenceStart) -> int:
        of_group = ended.get(start.group, running.get(start.group, 0))
        return max(of_group, len(start.tokens))

    return [*probes, *sorted(others, key=lambda start: -length(start))]


class Waiting:
    """In the order they came, or longest first where a sequence asks for that."""

    def __init__(self) -> None:
        self._starts: list[SequenceStart] = []
        self._ended: dict[str, int] = {}
        """By group: the most new tokens of a sequence that ended here. Forgotten once nothing waits."""

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[SequenceStart]:
        return iter(self._starts)

    def add(self, starts: Iterable[SequenceStart]) -> None:
        """Queue them."""
        self._starts.extend(starts)

    def drop(self, keys: set[str]) -> None:
        """Forget them."""
        self._starts = [start for start in self._starts if start.key not in keys]

    def ended(self, group: str, *, num_tokens: int) -> None:
        """A sequence of the group has ended."""
        if self._starts:
            self._ended[group] = max(self._ended.get(group, 0), num_tokens)

    def take(self, num: int, *, running: Callable[[], Mapping[str, int]]) -> list[SequenceStart]:
        """The next ones. `running` tells the tokens of running sequences by group, and is asked only
        where there is a choice."""
        if len(self._starts) > num and any(start.longest_first for start in self._starts):
            self._starts = longest_first(self._starts, ended=self._ended, running=running())
        taken, self._starts = self._starts[:num], self._starts[num:]
        if not self._starts:
            self._ended = {}
        return taken
