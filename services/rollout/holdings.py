"""What a rollout worker holds: sequences with their owner epoch, waiting for weights, generating, or
finished and not yet told. Pure bookkeeping; the service asks it what to do."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from jigsawrl.contract.message import Array, FinishReason, message_id
from jigsawrl.contract.parts import Held
from jigsawrl.contract.records import SequenceRecord
from services.rollout.engine.base import Generated, SequenceStart


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence under one owner epoch."""

    sequence: str
    epoch: int
    group: str
    incarnation: int
    min_version: int
    start: SequenceStart
    problem: dict[str, str]
    """What the environment needs between turns."""
    turn_finish_reason: FinishReason | None
    """Of the last turn, where the record that it was placed with waits for its environment."""
    placed_s: float
    """Clock of the event loop."""


class Holdings:
    """All sequences of one boot."""

    def __init__(self) -> None:
        self._held: dict[str, Holding] = {}
        self._waiting: dict[str, Holding] = {}
        self._ending: set[tuple[str, int]] = set()

    def has(self, sequence: str, epoch: int) -> bool:
        """Whether the sequence is held under this epoch or a later one."""
        held = self._held.get(sequence)
        return held is not None and held.epoch >= epoch

    def get(self, sequence: str) -> Holding | None:
        """The holding of a sequence."""
        return self._held.get(sequence)

    def add(self, holding: Holding) -> None:
        """Hold a sequence, which waits for its weights."""
        self._held[holding.sequence] = holding
        self._waiting[holding.sequence] = holding

    def waits(self, sequence: str) -> bool:
        """Whether the sequence waits for its weights."""
        return sequence in self._waiting

    def end(self, sequence: str, epoch: int) -> None:
        """Its outcome is known and will be told; it may be one that never was held."""
        self._ending.add((sequence, epoch))

    def ends(self, sequence: str, epoch: int) -> bool:
        """Whether an outcome is still to be told."""
        return (sequence, epoch) in self._ending

    def told(self, sequence: str, epoch: int) -> None:
        """The outcome is known to others, too: forget it and what is held."""
        self._ending.discard((sequence, epoch))
        self.remove(sequence, epoch)

    def release(self, incarnation: int, version: int) -> list[Holding]:
        """Sequences that these weights may generate; they wait no longer."""
        ready = [
            holding
            for holding in self._waiting.values()
            if holding.incarnation == incarnation and holding.min_version <= version
        ]
        for holding in ready:
            del self._waiting[holding.sequence]
        return ready

    def remove(self, sequence: str, epoch: int) -> bool:
        """Forget a sequence held at or below `epoch`; whether it was."""
        held = self._held.get(sequence)
        if held is None or held.epoch > epoch:
            return False
        del self._held[sequence]
        self._waiting.pop(sequence, None)
        return True

    def older_than(self, placed_s: float) -> dict[str, Holding]:
        """Sequences placed before that time."""
        return {name: one for name, one in self._held.items() if one.placed_s < placed_s}

    def inventory(self) -> tuple[Held, ...]:
        """Everything held."""
        return tuple(Held(one.sequence, one.epoch) for one in self._held.values())


def record_of(
    holding: Holding, generated: Generated, *, pipeline: str, is_whole: bool = False
) -> SequenceRecord:
    """The append-only record of what was generated so far. Where a turn has ended, either the sequence
    `is_whole` or it waits for its environment."""
    prompt, num_new = holding.start.prompt, len(generated.tokens)
    num_prompt, reason = len(prompt), generated.finish_reason
    own = ("whole",) if is_whole else ()  # one that waited may end without another token
    return SequenceRecord(
        id=message_id(SequenceRecord.tag(), holding.sequence, holding.epoch, num_new, *own),
        pipeline=pipeline,
        group=holding.group,
        sequence=holding.sequence,
        epoch=holding.epoch,
        num_prompt_tokens=num_prompt,
        tokens=Array.of("int32", [*prompt, *generated.tokens]),
        logprobs=Array.of("float32", [0.0] * num_prompt + generated.logprobs),
        versions=Array.of("int32", [-1] * num_prompt + generated.versions),
        loss_mask=Array.of(
            "uint8", [0] * num_prompt + [int(version >= 0) for version in generated.versions]
        ),
        finish_reason=reason if is_whole else None,
        turn_finish_reason=None if is_whole else reason,
    )


def start_of(
    sequence: str,
    *,
    group: str,
    seed: int,
    prompt: Iterable[int],
    resume: SequenceRecord | None,
    longest_first: bool = False,
) -> SequenceStart:
    """How the engine begins a sequence: from its prompt, or from a partial record."""
    start = SequenceStart(
        key=sequence, group=group, seed=seed, prompt=tuple(prompt), longest_first=longest_first
    )
    if resume is None:
        return start
    first = resume.num_prompt_tokens
    return msgspec.structs.replace(
        start,
        tokens=tuple(resume.tokens.tolist()[first:]),
        logprobs=tuple(resume.logprobs.tolist()[first:]),
        versions=tuple(resume.versions.tolist()[first:]),
    )
