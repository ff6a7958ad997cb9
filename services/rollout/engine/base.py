"""What a rollout engine is: the data that goes in and out, and the protocol.

The rollout and evaluation services call it, always from one thread; implementations know nothing of
the bus, of epochs or of records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec
import torch

from jigsawrl.contract.message import FinishReason

StepKind = Literal["prefill", "bulk_decode", "tail_decode"]


class SequenceStart(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, from its prompt or from where it stopped elsewhere."""

    key: str
    group: str
    """Sequences of one group share a prompt, whose keys and values are computed once."""
    seed: int
    """Any 64 bits; the draw of a token depends on (seed, position in the sequence) only."""
    prompt: tuple[int, ...]
    longest_first: bool = False
    """Of those that wait one of each group joins first, then those of the longest group."""
    max_new_tokens: int | None = None
    """Of the turn under way: ends before the engine's own limit; None = at that."""
    tokens: tuple[int, ...] = ()
    """Behind the prompt so far, [T]: generated ones, and between two turns those of the environment."""
    logprobs: tuple[float, ...] = ()
    """[T], 0 where not generated."""
    versions: tuple[int, ...] = ()
    """[T], -1 where not generated."""


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine has generated of one sequence."""

    key: str
    tokens: list[int]
    """[T], all behind the prompt, stop tokens included."""
    logprobs: list[float]
    """[T], of the distribution that the token was drawn from; 0 where not generated."""
    versions: list[int]
    """[T], policy version that made the token; -1 where not generated."""
    finish_reason: FinishReason | None
    """Of the last turn; None while it runs."""

    @property
    def own_versions(self) -> list[int]:
        """Of the generated tokens only."""
        return [version for version in self.versions if version >= 0]

    @classmethod
    def of(cls, start: SequenceStart, *, finish_reason: FinishReason | None = None) -> Generated:
        """What there is of a sequence before its next step."""
        return cls(
            key=start.key,
            tokens=list(start.tokens),
            logprobs=list(start.logprobs),
            versions=list(start.versions),
            finish_reason=finish_reason,
        )


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Time spent on one kind of work within a step."""

    kind: StepKind
    version: int
    started_s: float
    """Wall clock, seconds since the epoch."""
    duration_s: float
    num_tokens: int
    cpu_s: float | None = None
    """Seconds in which the thread had a core; None where another device computes."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did."""

    finished: list[Generated]
    work: list[Work]


class Engine(Protocol):
    """Generates many sequences at once, of each the turn under way. A step is one token of every
    running sequence, so that whatever is called between two steps takes effect at a token boundary."""

    @property
    def version(self) -> int | None:
        """Version of the loaded weights; None before the first."""

    @property
    def num_running(self) -> int:
        """Sequences that decode now."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a slot."""

    def check(self, start: SequenceStart) -> str | None:
        """Why the loaded model can't generate this sequence, in one line; None where it can."""

    def add(self, starts: Iterable[SequenceStart]) -> None:
        """Queue sequences that `check` passes; they join at the next steps, in this order unless one
        asks for `longest_first`."""

    def drop(self, keys: Iterable[str]) -> None:
        """Forget sequences; unknown keys are no error."""

    def snapshot(self, keys: Iterable[str]) -> list[Generated]:
        """How far live sequences are; unknown keys are left out."""

    def held(self) -> list[str]:
        """Keys of all sequences, running and waiting."""

    def load_weights(
        self, state: Mapping[str, torch.Tensor], *, model_config: str, version: int, keep_kv: bool
    ) -> None:
        """Go on with other weights. With `keep_kv` running sequences keep the keys and values that
        old weights computed; without it they are recomputed, as if the prefix were a prompt."""

    def step(self) -> Step:
        """Let waiting sequences join, draw one token for each running one, let finished ones go."""
