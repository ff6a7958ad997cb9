"""Commands: imperatives of the scheduler to one boot of one worker. Each names the event that
answers it. The id is (stream sequence of the message that caused it, index): a leader that
repeats a decision repeats the id.
"""

from __future__ import annotations

import msgspec

from jigsawrl.contract.message import Count, Ledger, Message, Ref, Role, Worker


class Command(Message, frozen=True, kw_only=True):
    """Base of all commands."""

    worker: Worker
    """The one who acts (a tenant's boot or a node's boot)."""
    leader_epoch: Count
    """Stream sequence of the leader's `LeaderElected`; workers refuse lower ones than they saw."""


# --- To nodes ------------------------------------------------------------------------------------


class StartTenant(Command, frozen=True, kw_only=True):
    """Start (and keep) one tenant process; answered by its `WorkerStarted`, or `WorkerFailed`."""

    tenant: str
    role: Role
    pipeline: str
    device: str | None
    """None for tenants that need no device (environment, reward)."""
    share: float = 1.0
    """Its first share of the device, as in `SetShares`."""
    pinned: bool = True
    """On a CPU slot: to that core. False leaves the choice of cores to the operating system."""


class StopTenant(Command, frozen=True, kw_only=True):
    """Stop a tenant for good, gracefully, then by force."""

    tenant: str


class RestartTenant(Command, frozen=True, kw_only=True):
    """Kill one boot of a tenant, at once, and start the next: a rank of its gang ended, and it may wait
    for that one for ever; or it is frozen. No failure of its own; answered by `WorkerStarted`."""

    tenant: str
    boot: str | None
    """Nothing is done where another boot runs. None = whichever does: it never said which it is."""


class ReleaseNode(Command, frozen=True, kw_only=True):
    """Stop, all that could be handed over was (answers `NodeLeaving`), or this boot is not wanted."""

    reason: str


class SetShares(Command, frozen=True, kw_only=True):
    """Divide a device anew; answered by `SharesApplied`. A share is a weight: the fraction of the
    device that a tenant has while all the others want to run; what one leaves idle, the others get.
    Shares of a device sum to 1 at most; 0 holds a tenant: it gets what others leave."""

    device: str
    shares: tuple[tuple[str, float], ...]
    """(tenant, share) of all tenants of the device, also of those that are about to start."""


# --- To every tenant -----------------------------------------------------------------------------


class Configure(Command, frozen=True, kw_only=True):
    """The resolved pipeline config (MessagePack); answered by `WorkerReady` or `WorkerRefused`."""

    config: bytes
    incarnation: Count
    gang_epoch: Count
    """Rises with every start of a trainer; names its checkpoints and events."""
    rank: Count = 0
    """Of a trainer in its gang; rank 0 is the one that publishes, records and commits."""
    num_ranks: Count = 1
    tail_sequences: Count | None = None
    """Of a rollout or evaluation worker: decoding so many sequences or fewer is a tail, as the
    scheduler counts it; None = the engine's own for its device."""


# --- To the environment --------------------------------------------------------------------------


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One group to make from the training prompt at `cursor`."""

    group: str
    epoch: Count
    cursor: Count


class MakeGroups(Command, frozen=True, kw_only=True):
    """Make prompts; answered by `GroupsMade` per group."""

    orders: tuple[GroupOrder, ...]


# --- To rollout workers --------------------------------------------------------------------------


class LoadWeights(Command, frozen=True, kw_only=True):
    """Load a version at the next token boundary; answered by `WeightsLoaded`."""

    incarnation: Count
    version: Count
    manifest: Ref


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence given to a worker under an owner epoch."""

    sequence: str
    epoch: Count
    group: Ref
    """A `GroupRecord`."""
    seed: int
    """Seed of every random draw of this sequence; the draw depends on (seed, position) only."""
    resume: Ref | None
    """A partial `SequenceRecord` to go on from; None = from the prompt."""
    min_version: Count
    """Generation waits until the worker has at least this version."""


class PlaceSequences(Command, frozen=True, kw_only=True):
    """Generate; answered by `SequencesAccepted`, later by `SequencesFinished`."""

    incarnation: Count
    placements: tuple[Placement, ...]
    longest_first: bool = False
    """Where they do not all run at once: first one of each group, then those of the group with the
    longest sample so far, instead of in this order."""


class Drop(Command, frozen=True, kw_only=True):
    """Forget sequences held at or below these epochs; nothing answers it but the next inventory."""

    sequences: tuple[tuple[str, Count], ...]
    """(sequence, epoch)."""


class MigrateSequences(Command, frozen=True, kw_only=True):
    """Stop these at the next token boundary and store what there is of each, so that others go on with
    them; answered per id by `SequencesExported`. Nothing is given up before that is stored."""

    sequences: tuple[tuple[str, Count], ...]
    """(sequence, epoch): held under another epoch is not held."""


# --- To the reward service -----------------------------------------------------------------------


class ScoreOrder(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to score."""

    sequence: str
    epoch: Count
    group: Ref
    record: Ref
    """A whole `SequenceRecord`."""


class ScoreSequences(Command, frozen=True, kw_only=True):
    """Score; answered by `SequencesRewarded` per sequence."""

    orders: tuple[ScoreOrder, ...]


# --- To trainers ---------------------------------------------------------------------------------


class TrainedSequence(msgspec.Struct, frozen=True, kw_only=True):
    """One surviving sequence of a cut group."""

    sequence: str
    record: Ref
    reward: Ref


class TrainedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """One group of a cut, its survivors in index order (at least `min_group_size`)."""

    group: str
    prompt: Ref
    sequences: tuple[TrainedSequence, ...]


class BatchCut(Command, frozen=True, kw_only=True):
    """Train exactly these groups in this (admission) order from `version` to `version + 1`; each rank
    of the gang gets it, and rank 0 answers by `VersionPublished` of `version + 1`."""

    incarnation: Count
    gang_epoch: Count
    version: Count
    groups: tuple[TrainedGroup, ...]
    ledger: Ledger
    """As it stands after this step; saved in checkpoints."""
    retain_versions: tuple[tuple[Count, Count], ...]
    """(incarnation, version) that must stay on the weight channel; the trainer purges all others but
    its newest two."""
    substages: dict[str, tuple[float, float]]
    """Sub-stage kind -> (seconds summed over workers, mean share) since the last cut, for metrics."""
    rollout_s: float
    """Stream time from the first placement for this version to the cut, seconds."""


class PublishWeights(Command, frozen=True, kw_only=True):
    """Publish the version the trainer holds; each rank of the gang gets it, and rank 0 answers by
    `VersionPublished`."""

    incarnation: Count
    gang_epoch: Count
    version: Count
    retain_versions: tuple[tuple[Count, Count], ...]
    """As in `BatchCut`."""


# --- To evaluation workers -----------------------------------------------------------------------


class Evaluate(Command, frozen=True, kw_only=True):
    """Evaluate a version on the held-out set; answered by `EvaluationFinished` or `-Failed`."""

    incarnation: Count
    version: Count
    manifest: Ref
    attempt: Count


CommandType = (
    StartTenant
    | StopTenant
    | RestartTenant
    | ReleaseNode
    | SetShares
    | Configure
    | MakeGroups
    | LoadWeights
    | PlaceSequences
    | Drop
    | MigrateSequences
    | ScoreSequences
    | BatchCut
    | PublishWeights
    | Evaluate
)
