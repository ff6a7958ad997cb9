"""What events list: one group, one sequence, one span of work each. Re-exported by `events`."""

from __future__ import annotations

import msgspec

from jigsawrl.contract.message import Count, FinishReason, Ref, SubStageKind


class AppliedShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant was to have of its device, and what it has."""

    tenant: str
    asked: float
    applied: float
    """Fraction of the device that it has while all its tenants want to run."""


class Held(msgspec.Struct, frozen=True, order=True):
    """One sequence that a rollout worker holds."""

    sequence: str
    epoch: Count


class SubStage(msgspec.Struct, frozen=True, kw_only=True):
    """One span of work of one kind."""

    kind: SubStageKind
    version: Count
    started_s: float
    """Wall clock of the worker, seconds since the epoch; for people and traces only."""
    ended_s: float
    """End of its last iteration, on the same clock."""
    duration_s: float
    """Of the iterations together: less than from start to end where other work came between."""
    num_iterations: Count
    num_tokens: Count
    cpu_s: float | None = None
    """Seconds in which the computing thread had a core: on a CPU slot, what the span would have lasted
    alone there. None where that says nothing of it (GPUs, transfers, waits)."""


class GroupMade(msgspec.Struct, frozen=True, kw_only=True):
    """One group's prompt is stored."""

    group: str
    epoch: Count
    ref: Ref
    """A `GroupRecord`."""
    num_prompt_tokens: Count


class GroupFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One group's prompt could not be made."""

    group: str
    epoch: Count
    reason: str


class SequenceProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far a live sequence is; `ref` is a partial `SequenceRecord` to restart from."""

    sequence: str
    epoch: Count
    ref: Ref
    num_tokens: Count


class SequenceFinish(msgspec.Struct, frozen=True, kw_only=True):
    """One completed sequence; `ref` is its whole `SequenceRecord`."""

    sequence: str
    epoch: Count
    ref: Ref
    finish_reason: FinishReason
    num_tokens: Count
    """Generated tokens."""
    min_version: Count
    max_version: Count


class SequenceFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that can't be generated or scored, with the reason."""

    sequence: str
    epoch: Count
    reason: str


class SequenceExport(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence that its owner has stopped and holds no longer."""

    sequence: str
    epoch: Count
    ref: Ref | None
    """A partial `SequenceRecord`; None where this owner made no token: then what it was placed with
    still holds."""
    num_tokens: Count
    """Generated tokens so far, those of earlier owners included."""
    min_version: Count | None
    max_version: Count | None
    """Of those tokens; None where there are none. The next owner must have `max_version`."""


class SequenceReward(msgspec.Struct, frozen=True, kw_only=True):
    """One score; `ref` is the `RewardRecord`."""

    sequence: str
    epoch: Count
    ref: Ref
    reward: float
