"""Who may do what on the bus: one row per role of a process, beside the table of streams.

Read by `jigsawrl.bus.permissions`, which turns a row into what a nats-server lets a certificate do, and
by people. A program that does something new on the bus gets it here, or a server with credentials
refuses it; a server without any does not look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jigsawrl.contract import events as e
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Role
from jigsawrl.contract.records import (
    GroupRecord,
    Record,
    RewardRecord,
    SequenceRecord,
    WeightChunk,
    WeightManifest,
)

ServiceRole = Literal["scheduler", "node", "client"] | Role
"""Of a process: a service, or whoever asks the scheduler (`jigsaw submit`, `jigsaw status`)."""

Target = Literal["scheduler", "status", "environment", "reward"]
"""Who answers requests; of the last two every pipeline has its own."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """What one role does on the bus."""

    events: tuple[type[Event], ...] = ()
    """That it publishes."""
    records: tuple[type[Record], ...] = ()
    """That it stores."""
    asks: tuple[Target, ...] = ()
    answers: tuple[Target, ...] = ()
    takes_commands: bool = False
    reads_records: bool = False
    reads_weights: bool = False
    keeps_weights: bool = False
    """Removes versions from the weight channel."""
    tells: bool = True
    """Telemetry, and dead letters for what it can't read."""
    watches: bool = False
    """Sees events and telemetry as they pass."""
    inspects: bool = False
    """Asks the server how full its streams are, and reads dead letters."""
    leads: bool = False
    """Makes, reads, purges and deletes streams, sends commands, stores snapshots, holds the lease."""


_TENANT = (e.WorkerStarted, e.WorkerReady, e.WorkerAlive, e.WorkerRefused, e.SubStagesEnded)
"""Of every tenant."""

ACCESS: dict[ServiceRole, Access] = {
    "scheduler": Access(
        events=(
            e.LeaderElected,
            e.Tick,
            e.PipelineSubmitted,
            e.PipelineCancelled,
            e.PipelinePaused,
            e.PipelineResumed,
        ),
        answers=("scheduler", "status"),
        leads=True,
    ),
    "node": Access(
        events=(
            e.NodeStarted,
            e.NodeLeaving,
            e.NodeStopped,
            e.TenantStopped,
            e.Heartbeat,
            e.SharesApplied,
            e.WorkerExited,
            e.WorkerFailed,
        ),
        takes_commands=True,
    ),
    "environment": Access(
        events=(*_TENANT, e.GroupsMade),
        records=(GroupRecord,),
        answers=("environment",),
        takes_commands=True,
        reads_records=True,
    ),
    "rollout": Access(
        events=(
            *_TENANT,
            e.Inventory,
            e.SequencesAccepted,
            e.SequencesProgressed,
            e.SequencesFinished,
            e.SequencesExported,
            e.WeightsLoaded,
        ),
        records=(SequenceRecord,),
        asks=("environment",),
        takes_commands=True,
        reads_records=True,
        reads_weights=True,
    ),
    "reward": Access(
        events=(*_TENANT, e.SequencesRewarded),
        records=(RewardRecord,),
        answers=("reward",),
        takes_commands=True,
        reads_records=True,
    ),
    "trainer": Access(
        events=(*_TENANT, e.VersionPublished, e.CheckpointCommitted),
        records=(WeightManifest, WeightChunk),
        asks=("status",),
        takes_commands=True,
        reads_records=True,
        reads_weights=True,
        keeps_weights=True,
    ),
    "evaluation": Access(
        events=(*_TENANT, e.EvaluationFinished, e.EvaluationFailed),
        asks=("environment", "reward"),
        takes_commands=True,
        reads_records=True,
        reads_weights=True,
    ),
    "client": Access(asks=("scheduler",), tells=False, watches=True, inspects=True),
}


def askers(target: Target) -> tuple[ServiceRole, ...]:
    """The roles that ask `target`."""
    return tuple(role for role, access in ACCESS.items() if target in access.asks)
