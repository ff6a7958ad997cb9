"""Events: past facts on the scheduler's one stream. They carry ids, counts and references, never
tokens. Lists are coalesced by the sender: never one message per sequence step.

Who publishes each is said in its docstring; the scheduler is the only reader that acts.
"""

from __future__ import annotations

from jigsawrl.contract.message import (
    CodeVersion,
    Count,
    Ledger,
    Message,
    Ref,
    Role,
    Worker,
)
from jigsawrl.contract.parts import (
    AppliedShare,
    GroupFailure,
    GroupMade,
    Held,
    SequenceExport,
    SequenceFailure,
    SequenceFinish,
    SequenceProgress,
    SequenceReward,
    SubStage,
)
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.contract.spec import Device, PipelineSpec


class Event(Message, frozen=True, kw_only=True):
    """Base of all events; `pipeline` is None where the fact belongs to the cluster."""

    pipeline: str | None = None


# --- Scheduler service and clients ---------------------------------------------------------------


class LeaderElected(Event, frozen=True, kw_only=True):
    """A scheduler took the lease. Its epoch is this message's stream sequence, and its schema the one
    that nodes and workers are held against."""

    leader: str
    code_version: str
    policy: str = "serial"
    """Name of the policy that decides from here on."""
    profile: DeviceProfile | None = None
    """What sub-stages cost on the cluster's devices; None = as the last leader that told one."""


class Tick(Event, frozen=True, kw_only=True):
    """Time passes: the leader's pulse, so that stream time moves when nothing else happens."""


class PipelineSubmitted(Event, frozen=True, kw_only=True):
    """The leader accepted a submission; `config` is the resolved config (MessagePack)."""

    spec: PipelineSpec
    config: bytes
    companions: tuple[str, ...] = ()
    """Pipelines that it starts its work together with: as soon as the processes of all of them are
    ready, or they have ended."""


class PipelineCancelled(Event, frozen=True, kw_only=True):
    """A client asked for the end of a pipeline."""

    reason: str
    submission: str | None = None
    """Id of the `PipelineSubmitted` that it ends; None ends whatever has the name."""


class PipelinePaused(Event, frozen=True, kw_only=True):
    """A client asked that nothing more of a pipeline begins, until `PipelineResumed`; what runs goes
    on to its end."""

    submission: str | None = None
    """Id of the `PipelineSubmitted` that is meant; None = whatever has the name."""


class PipelineResumed(Event, frozen=True, kw_only=True):
    """A client asked that a paused pipeline goes on."""

    submission: str | None = None
    """Id of the `PipelineSubmitted` that is meant; None = whatever has the name."""


# --- Nodes ---------------------------------------------------------------------------------------


class NodeStarted(Event, frozen=True, kw_only=True):
    """A node is ready to start tenants; everything an older boot of it ran is gone."""

    node: Worker
    devices: tuple[Device, ...]
    runs_id: str = ""
    """Of the folder that its trainers write into: nodes that tell the same one share it, so that a
    trainer finds its checkpoints on any of them. Empty = nobody else has it."""
    home: str = ""
    """``<host name>:<state folder>``: where one that bears the name of another is refused."""
    code_version: CodeVersion = ""
    clock_s: float | None = None
    """Wall clock of its machine when it said this, seconds since the epoch."""


class NodeLeaving(Event, frozen=True, kw_only=True):
    """A node was told to stop and waits for `ReleaseNode`, for `notice_s` at most: whatever can live
    elsewhere is handed over meanwhile. `NodeStopped` follows."""

    node: Worker
    notice_s: float
    reason: str


class TenantStopped(Event, frozen=True, kw_only=True):
    """A node has carried `StopTenant` out: the process is gone, and what it did at its end is done."""

    node: Worker
    tenant: str


class NodeStopped(Event, frozen=True, kw_only=True):
    """A node leaves on purpose; its tenants are stopped."""

    node: Worker
    reason: str


class Heartbeat(Event, frozen=True, kw_only=True):
    """Every 2 s per node; its absence is counted in stream time."""

    node: Worker
    clock_s: float | None = None
    """As in `NodeStarted`."""


class WorkerExited(Event, frozen=True, kw_only=True):
    """A tenant process ended without being told to; the node restarts it after a backoff."""

    worker: Worker
    exit_code: int
    reason: str


class WorkerFailed(Event, frozen=True, kw_only=True):
    """The node gave a tenant up (five failures in a row, or a refused configuration)."""

    worker: Worker
    reason: str


class SharesApplied(Event, frozen=True, kw_only=True):
    """How a device is divided from now on. Answers `SetShares`, and comes without being asked when a
    tenant's process starts or ends."""

    node: Worker
    device: str
    shares: tuple[AppliedShare, ...]
    """Tenants whose process runs; the others get their share when it starts."""
    mechanism: str
    """``cgroup v2 cpu.weight``, ``cgroup v1 cpu.shares``, ``nice``, or ``none``."""
    fell_back: str | None = None
    """Why nothing better was possible; one line for people."""


# --- Tenants -------------------------------------------------------------------------------------


class WorkerStarted(Event, frozen=True, kw_only=True):
    """A tenant process is up and its command consumer exists; answered by `Configure`.

    Frees at once everything that an older boot of the same id owned."""

    worker: Worker
    role: Role
    node: str | None
    """None where the process was started by hand."""
    device: str | None
    code_version: CodeVersion = ""


class WorkerReady(Event, frozen=True, kw_only=True):
    """Answers `Configure`: the tenant takes work.

    A trainer says what it restored, and which gang it is; None for others."""

    worker: Worker
    role: Role
    version: Count | None = None
    """0 after a fresh start."""
    ledger: Ledger | None = None
    """Of that version."""
    gang_epoch: Count | None = None


class WorkerAlive(Event, frozen=True, kw_only=True):
    """A tenant's process runs and its event loop turns: every 10 s. One that is not heard for three
    times as long has lost its work."""

    worker: Worker


class WorkerRefused(Event, frozen=True, kw_only=True):
    """Answers `Configure`: the configuration cannot work here; the pipeline fails with `reason`."""

    worker: Worker
    reason: str


class Inventory(Event, frozen=True, kw_only=True):
    """All that a rollout worker holds: at start, on reconnect, and every 10 s.

    What it holds and no longer owns is answered by `Drop`."""

    worker: Worker
    held: tuple[Held, ...]


class SubStagesEnded(Event, frozen=True, kw_only=True):
    """Spans since the last such event, at most every 0.5 s and at the end of a phase."""

    worker: Worker
    spans: tuple[SubStage, ...]


# --- Environment ---------------------------------------------------------------------------------


class GroupsMade(Event, frozen=True, kw_only=True):
    """Answers `MakeGroups`."""

    worker: Worker
    made: tuple[GroupMade, ...]
    failed: tuple[GroupFailure, ...] = ()


# --- Rollout -------------------------------------------------------------------------------------


class SequencesAccepted(Event, frozen=True, kw_only=True):
    """Answers `PlaceSequences`, within the accept lease."""

    worker: Worker
    accepted: tuple[Held, ...]


class SequencesProgressed(Event, frozen=True, kw_only=True):
    """Every few seconds per worker, for sequences that run long."""

    worker: Worker
    progress: tuple[SequenceProgress, ...]


class SequencesFinished(Event, frozen=True, kw_only=True):
    """Sequences that a rollout worker completed (or can't), within 20 ms of the first."""

    worker: Worker
    finished: tuple[SequenceFinish, ...]
    failed: tuple[SequenceFailure, ...] = ()


class SequencesExported(Event, frozen=True, kw_only=True):
    """Answers `MigrateSequences`: each id stands in one of the three lists."""

    worker: Worker
    exported: tuple[SequenceExport, ...]
    finished: tuple[Held, ...] = ()
    """Ended before the command came: their `SequencesFinished` came, or comes."""
    not_held: tuple[Held, ...] = ()


class WeightsLoaded(Event, frozen=True, kw_only=True):
    """Answers `LoadWeights`."""

    worker: Worker
    incarnation: Count
    version: Count


# --- Reward --------------------------------------------------------------------------------------


class SequencesRewarded(Event, frozen=True, kw_only=True):
    """Answers `ScoreSequences`."""

    worker: Worker
    rewarded: tuple[SequenceReward, ...]
    failed: tuple[SequenceFailure, ...] = ()


# --- Trainer and evaluation ----------------------------------------------------------------------


class VersionPublished(Event, frozen=True, kw_only=True):
    """Weights of a version lie on the weight channel (or again, after a restart)."""

    worker: Worker
    gang_epoch: Count
    incarnation: Count
    version: Count
    manifest: Ref
    num_bytes: Count
    num_trained_tokens: Count
    """Generated tokens of the batch that led to this version; 0 for version 0. A republication says
    it again, and the scheduler counts it once."""
    metrics: dict[str, float]
    """The step's metrics; empty for version 0."""


class CheckpointCommitted(Event, frozen=True, kw_only=True):
    """A checkpoint's marker is on disk; group data before it is no longer needed."""

    worker: Worker
    gang_epoch: Count
    incarnation: Count
    version: Count
    path: str


class EvaluationFinished(Event, frozen=True, kw_only=True):
    """Answers `Evaluate`."""

    worker: Worker
    incarnation: Count
    version: Count
    num_problems: Count
    num_correct: Count
    mean_reward: float
    mean_num_tokens: float
    duration_s: float


class EvaluationFailed(Event, frozen=True, kw_only=True):
    """Answers `Evaluate` where it could not be done; the scheduler sends it again, thrice at most."""

    worker: Worker
    incarnation: Count
    version: Count
    reason: str


EventType = (
    LeaderElected
    | Tick
    | PipelineSubmitted
    | PipelineCancelled
    | PipelinePaused
    | PipelineResumed
    | NodeStarted
    | NodeLeaving
    | TenantStopped
    | NodeStopped
    | Heartbeat
    | SharesApplied
    | WorkerExited
    | WorkerFailed
    | WorkerStarted
    | WorkerReady
    | WorkerRefused
    | WorkerAlive
    | Inventory
    | SubStagesEnded
    | GroupsMade
    | SequencesAccepted
    | SequencesProgressed
    | SequencesFinished
    | SequencesExported
    | WeightsLoaded
    | SequencesRewarded
    | VersionPublished
    | CheckpointCommitted
    | EvaluationFinished
    | EvaluationFailed
)
