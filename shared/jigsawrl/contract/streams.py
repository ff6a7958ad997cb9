"""Subjects and the one table of streams: who publishes, how long it is kept, what happens when full.

A subject's last token is the message tag. Names of pipelines and nodes are single tokens (see
`check_name`); a tenant's id is two, ``<pipeline>.<role><index>``, so that one wildcard covers a
pipeline's tenants.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Worker
from jigsawrl.contract.records import (
    DeadLetter,
    GroupRecord,
    Record,
    RewardRecord,
    SequenceRecord,
    WeightChunk,
    WeightManifest,
)
from jigsawrl.contract.requests import Activity

NEARLY_FULL = 0.95
"""Share of a stream or the store, from which on somebody will soon wait for room. The alert
``JigsawStreamNearlyFull`` has the same."""

MAX_PAYLOAD_BYTES = 8 * 1024 * 1024
"""The embedded server's ``max_payload``; one message with its headers must fit."""

MAX_WEIGHT_BYTES = 2 * 1024**3
"""One version on the weight channel: more would hold up everything else on the server."""

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""Pipelines and nodes."""


def check_name(name: str, what: str) -> None:
    """Raise ValueError unless `name` can be a subject token, a folder and a stream name."""
    if not NAME_PATTERN.fullmatch(name):
        raise ValueError(
            f"{what} {name!r} must be 1 to 63 letters, digits, '-' or '_', not starting with"
            " '-' or '_'"
        )


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the stream table."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "interest"]
    storage: Literal["file", "memory"] = "file"
    max_bytes: int
    max_msgs_per_subject: int | None = None
    duplicate_window_s: float = 120.0
    publishers: str
    """Who publishes."""
    when_full: str
    """What the publisher does when the server refuses a message because the stream is full.
    Discard policy is NEW in every row: the server refuses, it never drops what is stored."""


class Subjects(msgspec.Struct, frozen=True):
    """All subjects and stream names under one prefix."""

    prefix: str = "jig"

    # --- Subjects ---------------------------------------------------------------------------------

    def event(self, event: Event) -> str:
        """``jig.event.<pipeline or _cluster>.<tag>``."""
        return f"{self.prefix}.event.{event.pipeline or '_cluster'}.{event.tag()}"

    def command(self, command: Command) -> str:
        """``jig.command.<worker id>.<boot>.<tag>`` (the worker id may be two tokens)."""
        return f"{self.commands_of(command.worker)[:-1]}{command.tag()}"

    def commands_of(self, worker: Worker) -> str:
        """The filter of one boot's command consumer."""
        return f"{self.prefix}.command.{worker.id}.{worker.boot}.>"

    def record(self, record: Record) -> str:
        """Where a record is stored."""
        if isinstance(record, WeightManifest | WeightChunk):
            base = self.weights_of_version(record.pipeline, record.incarnation, record.version)
            if isinstance(record, WeightManifest):
                return f"{base}.weight_manifest"
            return f"{base}.{record.index}.weight_chunk"
        if isinstance(record, DeadLetter):
            return f"{self.prefix}.dead.{record.pipeline or '_cluster'}.{record.tag()}"
        assert isinstance(record, GroupRecord | SequenceRecord | RewardRecord)
        return f"{self.prefix}.data.{record.pipeline}.{record.tag()}"

    def weights_of_version(self, pipeline: str, incarnation: int | str, version: int | str) -> str:
        """Prefix of the subjects of one published version; ``*`` for any."""
        return f"{self.prefix}.weights.{pipeline}.{incarnation}.{version}"

    def request(self, target: str) -> str:
        """``jig.request.<target>``; targets: ``scheduler``, ``status`` (the same leader, which there
        only tells), ``<pipeline>.environment``, ``<pipeline>.reward``."""
        return f"{self.prefix}.request.{target}"

    def telemetry(self, activity: Activity) -> str:
        """``jig.telemetry.<pipeline>.activity``."""
        return f"{self.prefix}.telemetry.{activity.pipeline}.{activity.tag()}"

    # --- Streams ----------------------------------------------------------------------------------

    def events_stream(self) -> StreamSpec:
        """The scheduler's one event stream."""
        return StreamSpec(
            name=self._stream("EVENTS"),
            subjects=(f"{self.prefix}.event.>",),
            retention="limits",
            max_bytes=2 * 1024**3,
            publishers="all services; the leader purges before its last but one snapshot",
            when_full="the publisher keeps the event and tries again, taking no new work meanwhile; the"
            " leader purges up to its newest snapshot",
        )

    def commands_stream(self) -> StreamSpec:
        """Commands; kept only while the boot they name has a consumer."""
        return StreamSpec(
            name=self._stream("COMMANDS"),
            subjects=(f"{self.prefix}.command.>",),
            retention="interest",
            max_bytes=512 * 1024**2,
            publishers="the leader",
            when_full="the leader keeps the command and tries again; with 2,000 waiting it folds no"
            " more",
        )

    def snapshots_stream(self) -> StreamSpec:
        """The scheduler's last snapshots."""
        return StreamSpec(
            name=self._stream("SNAPSHOTS"),
            subjects=(f"{self.prefix}.snapshot",),
            retention="limits",
            max_bytes=256 * 1024**2,
            max_msgs_per_subject=2,
            publishers="the leader",
            when_full="the leader logs it and goes on without a new snapshot",
        )

    def dead_letters_stream(self) -> StreamSpec:
        """What could not be decoded or handled."""
        return StreamSpec(
            name=self._stream("DEAD"),
            subjects=(f"{self.prefix}.dead.>",),
            retention="limits",
            max_bytes=64 * 1024**2,
            publishers="all services",
            when_full="the letter is logged and dropped",
        )

    def data_stream(self, pipeline: str, max_bytes: int = 1024**3) -> StreamSpec:
        """One pipeline's records; sized by the pipeline's config."""
        return StreamSpec(
            name=self._stream("DATA", pipeline),
            subjects=(f"{self.prefix}.data.{pipeline}.>",),
            retention="limits",
            max_bytes=max_bytes,
            publishers="environment, rollout and reward of the pipeline; the leader purges what"
            " checkpoints cover",
            when_full="the publisher keeps the record and tries again; it takes no new work meanwhile",
        )

    def weights_stream(self, pipeline: str, max_bytes: int = 1024**3) -> StreamSpec:
        """One pipeline's weight channel: two versions, pinned ones, and the one being written."""
        return StreamSpec(
            name=self._stream("WEIGHTS", pipeline),
            subjects=(f"{self.prefix}.weights.{pipeline}.>",),
            retention="limits",
            max_bytes=max_bytes,
            publishers="rank 0 of the pipeline's trainer, which purges old versions",
            when_full="the trainer keeps the version and tries again, saying how many bytes it needs;"
            " it trains no further meanwhile",
        )

    def cluster_streams(self) -> tuple[StreamSpec, ...]:
        """The streams that exist once per cluster; those of a pipeline are made on submission."""
        return (
            self.events_stream(),
            self.commands_stream(),
            self.snapshots_stream(),
            self.dead_letters_stream(),
        )

    def lease_bucket(self) -> str:
        """KV bucket of the leader lease."""
        return self._stream("LEASE")

    def _stream(self, kind: str, pipeline: str | None = None) -> str:
        name = f"{self.prefix.upper().replace('.', '_')}_{kind}"
        return name if pipeline is None else f"{name}_{pipeline}"
