"""All that the scheduler knows, as plain structs: a snapshot is the MessagePack of `State`.

Only dicts and lists, whose order survives encoding: a scheduler restored from a snapshot must walk
them in the same order to give the same commands. Nothing outside the core changes these structs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from jigsawrl.contract.message import Ledger, Ref, Role, Worker
from jigsawrl.contract.profile import DeviceProfile
from jigsawrl.contract.requests import EvaluationResult
from jigsawrl.contract.spec import Device, PipelineSpec
from jigsawrl.core.allotment import Allotment
from jigsawrl.core.clock import StreamClock
from jigsawrl.core.group import Group
from jigsawrl.core.ids import IdRanges
from jigsawrl.core.introduction import Introduction
from jigsawrl.core.outlook import Outlooks, Pace
from jigsawrl.core.slowdown import TAIL_SEQUENCES
from jigsawrl.core.work_history import WorkHistory

PipelineStage = Literal["queued", "starting", "running", "finishing", "finished", "failed"]
Fate = Literal["trained", "filtered", "stale", "discarded", "failed"]
FATES: tuple[Fate, ...] = ("trained", "filtered", "stale", "discarded", "failed")


class Cut(msgspec.Struct):
    """The batch that turns `version` into `version + 1`."""

    version: int
    groups: list[Group]
    ledger: Ledger
    """As it stands once it is trained."""
    substages: dict[str, tuple[float, float]]
    rollout_s: float
    sent_gang: int | None = None
    """Gang epoch of the trainers that got it."""
    trained: bool = False
    num_trained_tokens: int = 0


class Published(msgspec.Struct, frozen=True):
    """One version on the weight channel."""

    incarnation: int
    manifest: Ref


class Tenant(msgspec.Struct):
    """One worker id of a pipeline and the boot that lives now."""

    id: str
    role: Role
    node: str | None
    """The node on which the scheduler placed it; None where it was started by hand."""
    device: str | None
    started_on: str | None = None
    """Boot of the node that got `StartTenant`."""
    share: float | None = None
    """Of its device, as last commanded; None where nothing was."""
    applied_share: float | None = None
    """As its node last reported it; None where it has none, or its node's boot has ended."""
    boot: str | None = None
    code_version: str = ""
    """That this boot runs."""
    past_boots: list[str] = []
    configured: bool = False
    ready: bool = False
    lost: bool = False
    """Its node is silent, or it is itself."""
    leaving: bool = False
    """Its node stops soon: what it holds is handed over."""
    stopping: bool = False
    """It was told to end there, and lives elsewhere once it has."""
    heard_s: float = 0.0
    """Stream time of its last sign of life, or of the last order to start it."""
    incarnation: int = 0
    version: int | None = None
    """Weights it has loaded."""
    loading: tuple[int, int] | None = None
    """(incarnation, version) it was told to load."""
    load_since_s: float = 0.0
    load_late: bool = False

    @property
    def usable(self) -> bool:
        """Takes work now."""
        return self.ready and not self.lost and not self.leaving

    @property
    def worker(self) -> Worker:
        """The boot that lives."""
        assert self.boot is not None
        return Worker(id=self.id, boot=self.boot)


class Node(msgspec.Struct):
    """One machine's supervisor."""

    id: str
    boot: str
    devices: list[Device]
    seen_s: float
    up: bool = True
    past_boots: list[str] = []
    runs_id: str = ""
    home: str = ""
    leaving: bool = False
    """It stops soon: its tenants are handed over, and nothing new is placed there."""
    released: bool = False
    """It was told that nothing is left to hand over."""
    strays: list[str] = []
    """Tenants that live elsewhere now, and whose processes here are to be stopped."""

    @property
    def open(self) -> bool:
        """Takes new tenants."""
        return self.up and not self.leaving


class Evaluation(msgspec.Struct):
    """The evaluation that runs, or waits for its worker."""

    version: int
    incarnation: int
    attempt: int = 0
    num_failures: int = 0
    sent_to: Worker | None = None


class Pipeline(msgspec.Struct):
    """One pipeline."""

    spec: PipelineSpec
    config: bytes
    submitted_s: float = 0.0
    companions: list[str] = []
    """Pipelines that it begins its work together with."""
    stage: PipelineStage = "queued"
    waits_for: str | None = None
    """Why nothing of it may be placed now; for people."""
    paused: bool = False
    """By a client, until it is resumed by one."""
    failure: str | None = None
    tenants: dict[str, Tenant] = {}
    drops: dict[str, list[tuple[str, int]]] = {}
    """Per tenant: (sequence, epoch) that it must forget."""
    stops: list[str] = []
    """Tenants to stop."""
    restarts: dict[str, str | None] = {}
    """Tenant -> boot (None where it never said which) to be killed and started again."""
    submissions: list[str] = []
    """Ids of the last `PipelineSubmitted` under its name, its own last: their repeats are ignored."""

    # Weights and training
    version: int | None = None
    base_version: int = 0
    """Version at which this history began: 0, or what the first trainer restored."""
    incarnation: int = 0
    gang_epoch: int = 0
    published: dict[int, Published] = {}
    """By version: the newest version's, and those under or due for evaluation."""
    trainer_version: int | None = None
    """Version the living trainer holds; None until all its ranks are ready."""
    publish_due: bool = False
    checkpoint_version: int | None = None
    cuts: list[Cut] = []
    """Open or not yet covered by a checkpoint, by version."""

    # Groups
    num_admitted: int = 0
    num_trained_before: int = 0
    """Groups trained up to `base_version`."""
    next_cursor: int = 0
    returned_cursors: list[int] = []
    groups: dict[int, Group] = {}
    """In flight and in no cut, in admission order."""
    to_make: list[int] = []
    to_place: list[int] = []
    to_score: list[tuple[int, int]] = []
    """Work without an owner: group numbers, and (group number, sequence index)."""
    num_waiting: int = 0
    """Sequences in stage ``waiting``, those of groups without a prompt included."""
    num_generating: dict[str, int] = {}
    """By rollout worker that owns some; see `tally`."""
    turned: dict[str, bool] = {}
    """Tenants that do something else since the policy last looked (a dict as an ordered set)."""
    group_fates: dict[Fate, IdRanges] = {}
    sequence_fates: dict[Fate, IdRanges] = {}
    num_failed_in_row: int = 0
    num_filtered: int = 0
    """Groups that dynamic sampling filtered since the last cut."""
    last_group_failure: str = ""
    data_sequence: int = 0
    """Highest data-stream sequence seen in a reference."""

    # Prediction
    tail_sequences: int = TAIL_SEQUENCES["cpu"]
    """On a rollout worker that holds no more, decoding is a tail: what its workers were told."""
    work: WorkHistory = msgspec.field(default_factory=WorkHistory)
    version_s: dict[int, float] = {}
    """Stream time at which the last versions were published first."""
    errors: list[tuple[float, float]] = []
    """(predicted, observed) full-speed seconds of the sub-stages that ended last."""

    pace: Pace = msgspec.field(default_factory=Pace)

    # Migration
    num_migrations: int = 0
    num_migrated_tokens: int = 0
    num_tokens_again: int = 0
    """Tokens of finished sequences that may have been made more than once: an owner was lost."""

    # Evaluation
    evaluation: Evaluation | None = None
    evaluations_due: list[int] = []
    evaluations: list[EvaluationResult] = []
    evaluations_skipped: list[int] = []
    """Versions that came due while another was evaluated."""

    # Measures
    substages: dict[str, tuple[float, float]] = {}
    """Kind -> (seconds, seconds x share) since the last cut."""
    placed_since_s: float | None = None
    metrics: dict[str, float] = {}
    num_trained_tokens: int = 0
    running_since_s: float | None = None
    running_s: float = 0.0
    leases_checked_s: float = 0.0
    num_ignored: int = 0

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name

    @property
    def active(self) -> bool:
        """Has tenants and gets decisions."""
        return self.stage in ("starting", "running", "finishing")

    @property
    def live(self) -> bool:
        """Has not ended."""
        return self.stage not in ("finished", "failed")

    @property
    def open_cut(self) -> Cut | None:
        """The cut that is being trained."""
        return self.cuts[-1] if self.cuts and not self.cuts[-1].trained else None

    @property
    def gang(self) -> list[Tenant]:
        """Its trainer's ranks, in order of rank."""
        return [t for t in self.tenants.values() if t.role == "trainer"]

    @property
    def gang_ready(self) -> bool:
        """All ranks have restored the same version."""
        gang = self.gang
        return len(gang) == self.spec.num_trainer_ranks and all(t.ready for t in gang)

    @property
    def gang_usable(self) -> bool:
        """All ranks take work now."""
        return self.gang_ready and all(t.usable for t in self.gang)

    @property
    def trainer(self) -> Tenant | None:
        """Rank 0 of its trainer: the one that publishes, records and commits."""
        return next((t for t in self.tenants.values() if t.role == "trainer"), None)

    @property
    def retained(self) -> tuple[tuple[int, int], ...]:
        """(incarnation, version) of what must stay on the weight channel."""
        return tuple(sorted((p.incarnation, version) for version, p in self.published.items()))

    def usable(self, role: Role) -> list[Tenant]:
        """Tenants of a role that take work now, in order of joining."""
        return [t for t in self.tenants.values() if t.role == role and t.usable]

    def note_ref(self, ref: Ref) -> None:
        """Remember how far the data stream is known to reach."""
        self.data_sequence = max(self.data_sequence, ref.sequence)


class State(msgspec.Struct):
    """Everything."""

    outlooks: Outlooks = msgspec.field(default_factory=Outlooks)
    """What the policy `jigsaw` decided last."""
    pool: Allotment = msgspec.field(default_factory=Allotment)
    """What the policy `rlix` decided last."""
    clock: StreamClock = msgspec.field(default_factory=StreamClock)
    sequence: int = 0
    """Stream sequence of the last message folded."""
    leader: str = ""
    leader_epoch: int = 0
    policy: str = "serial"
    """Name of the policy that the leader was started with."""
    profile: DeviceProfile | None = None
    """The last that a leader was started with."""
    decided_s: float = -1.0
    dirty: dict[str, bool] = {}
    """Pipelines that an event touched since the last decision (a dict as an ordered set)."""
    schema: int = 1
    """The leader's, against which others are held."""
    introductions: dict[str, Introduction] = {}
    """By node: what it said of itself."""
    nodes: dict[str, Node] = {}
    node_orders: dict[str, bool] = {}
    """Nodes that leave or have strays, to be told something in the next decision."""
    unwanted: dict[str, str] = {}
    """Boots of nodes whose name another one has: boot -> node."""
    joined_s: float | None = None
    """Stream time at which the newest joined, as long as others may be on their way; see `nodes`."""
    residents: dict[str, list[str]] = {}
    """By device: tenants of active pipelines that the scheduler placed there; see `shares`."""
    undivided: dict[str, bool] = {}
    """Devices whose residents changed since they were divided last (a dict as an ordered set)."""
    pipelines: dict[str, Pipeline] = {}
    """In order of submission."""
    num_ignored: int = 0
    """Events, or entries of events, that were stale, repeated or of unknown objects."""

    @property
    def decision_due(self) -> bool:
        """Something was touched since the last decision."""
        return bool(self.dirty or self.node_orders or self.unwanted)

    def touch(self, pipeline: Pipeline) -> None:
        """Have the next decision look at it."""
        self.dirty[pipeline.spec.name] = True


def new_pipeline(
    spec: PipelineSpec,
    config: bytes,
    *,
    gang_epoch: int,
    submissions: Iterable[str] = (),
    companions: Iterable[str] = (),
) -> Pipeline:
    """A queued pipeline."""
    return Pipeline(
        spec=spec,
        config=config,
        gang_epoch=gang_epoch,
        submissions=list(submissions),
        companions=list(companions),
        group_fates={fate: IdRanges() for fate in FATES},
        sequence_fates={fate: IdRanges() for fate in FATES},
    )
