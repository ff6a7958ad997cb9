"""What the engine remembers of running sequences, as tensors with one row a slot, so that a decode
step needs no loop over sequences.

Called by `torch_engine`. Letters: N running sequences · C positions of capacity."""

from __future__ import annotations

import torch
from torch import Tensor

from services.rollout.engine.base import Generated, SequenceStart
from services.rollout.engine.sampling import uniforms


class Running:
    """What a slot's tensors don't hold."""

    def __init__(self, start: SequenceStart, *, prefix_version: int, limit: int) -> None:
        self.start = start
        self.prefix_version = prefix_version
        """Version whose weights computed the keys and values of the prompt."""
        self.limit = limit
        """Tokens at which the sequence ends, prompt included."""


class Slots:
    """Slots 0 to N - 1 hold the running sequences."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.running: list[Running] = []
        self.capacity_tokens = 0
        self._num_rows = 0
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, dtype=torch.float32, device=device)
        self._versions = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._draws = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._last = torch.zeros(0, dtype=torch.int64, device=device)
        self._limits = torch.zeros(0, dtype=torch.int64, device=device)

    @property
    def num_running(self) -> int:
        """N."""
        return len(self.running)

    def _columns(self) -> tuple[Tensor, ...]:
        return (self._tokens, self._logprobs, self._versions, self._draws)

    def grow(self, *, num_rows: int, capacity_tokens: int) -> None:
        """Have at least this much room."""
        if num_rows <= self._num_rows and capacity_tokens <= self.capacity_tokens:
            return
        old_rows, old_capacity = self._num_rows, self.capacity_tokens
        self._num_rows = max(num_rows, old_rows)
        self.capacity_tokens = max(capacity_tokens, old_capacity)
        grown = []
        for old in self._columns():
            new = torch.zeros(
                self._num_rows, self.capacity_tokens, dtype=old.dtype, device=self._device
            )
            new[:old_rows, :old_capacity] = old
            grown.append(new)
        self._tokens, self._logprobs, self._versions, self._draws = grown
        extra = torch.zeros(self._num_rows - old_rows, dtype=torch.int64, device=self._device)
        self._last, self._limits = torch.cat([self._last, extra]), torch.cat([self._limits, extra])
        self._fill_draws(0)

    def _fill_draws(self, first: int) -> None:
        """Every draw that the sequences from slot `first` on may need, made ahead: a draw depends
        on nothing but seed and position."""
        seeds = [one.start.seed for one in self.running[first:]]
        if seeds:
            positions = torch.arange(self.capacity_tokens, device=self._device)
            self._draws[first : len(self.running)] = uniforms(seeds, positions[None])

    def join(self, joining: list[Running]) -> None:
        """Put sequences into the next free slots; there must be room."""
        first = len(self.running)
        self.running.extend(joining)
        for slot, one in enumerate(joining, start=first):
            start = one.start
            known = [*start.prompt, *start.tokens]
            begin, end = len(start.prompt), len(known)
            self._tokens[slot, :end] = torch.tensor(known)
            self._logprobs[slot, begin:end] = torch.tensor(start.logprobs)
            self._versions[slot, begin:end] = torch.tensor(start.versions, dtype=torch.int32)
        lengths = [len(one.start.prompt) + len(one.start.tokens) for one in joining]
        end = len(self.running)
        self._last[first:end] = torch.tensor(lengths, device=self._device) - 1
        self._limits[first:end] = torch.tensor([one.limit for one in joining], device=self._device)
        self._fill_draws(first)

    def current(self) -> tuple[Tensor, Tensor]:
        """Last token [N] of each sequence and its position [N]."""
        last_N = self._last[: self.num_running]
        tokens_NC = self._tokens[: self.num_running]
        return tokens_NC.gather(1, last_N[:, None])[:, 0], last_N

    def next_draws(self) -> Tensor:
        """Uniform draws [N] for the next position of each sequence."""
        next_N1 = (self._last[: self.num_running] + 1)[:, None]
        return self._draws[: self.num_running].gather(1, next_N1)[:, 0]

    def append(
        self, tokens_N: Tensor, logprobs_N: Tensor, *, version: int, stops: Tensor
    ) -> list[tuple[int, bool]]:
        """Add a token to every sequence; the slots that are done, each with whether it stopped."""
        num = self.num_running
        self._last[:num] += 1
        last_N = self._last[:num]
        next_N1 = last_N[:, None]
        self._tokens[:num].scatter_(1, next_N1, tokens_N[:, None])
        self._logprobs[:num].scatter_(1, next_N1, logprobs_N[:, None])
        self._versions[:num].scatter_(1, next_N1, version)
        stopped_N = (tokens_N[:, None] == stops).any(1)
        done_N = stopped_N | (last_N + 1 >= self._limits[:num])
        done = done_N.nonzero()[:, 0]
        return list(zip(done.tolist(), stopped_N[done].tolist(), strict=True))

    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self._last[: self.num_running].max()) + 1 if self.running else 0

    def longest_of_groups(self) -> dict[str, int]:
        """By group: the new tokens of its longest sequence here."""
        longest: dict[str, int] = {}
        lasts = self._last[: self.num_running].tolist()
        for one, last in zip(self.running, lasts, strict=True):
            num_tokens = last + 1 - len(one.start.prompt)
            longest[one.start.group] = max(longest.get(one.start.group, 0), num_tokens)
        return longest

    def read(self, slot: int) -> Generated:
        """What was generated in a slot."""
        start = self.running[slot].start
        begin, end = len(start.prompt), int(self._last[slot]) + 1
        return Generated(
            key=start.key,
            tokens=self._tokens[slot, begin:end].tolist(),
            logprobs=self._logprobs[slot, begin:end].tolist(),
            versions=self._versions[slot, begin:end].tolist(),
            finish_reason=None,
        )

    def prefixes(self, slots: list[int]) -> list[list[int]]:
        """All tokens of sequences but the last, whose keys and values the next step computes."""
        lasts = self._last[slots].tolist()
        return [self._tokens[slot, :last].tolist() for slot, last in zip(slots, lasts, strict=True)]

    def leave(self, slots: set[int]) -> tuple[list[int], list[int]]:
        """Free slots; sequences beyond the new end move into the holes. Returns their old and new
        slots, for the cache to follow."""
        num = self.num_running - len(slots)
        holes = sorted(slot for slot in slots if slot < num)
        movers = [slot for slot in range(num, self.num_running) if slot not in slots]
        for mover, hole in zip(movers, holes, strict=True):
            self.running[hole] = self.running[mover]
        del self.running[num:]
        if movers:
            for column in (*self._columns(), self._last, self._limits):
                column[holes] = column[movers]
        return movers, holes
