"""Every metric there is: name, kind, labels and what it means. Nothing else names one.

Data only. The services that tell them make them (`services.exposition`), and the tests hold the Grafana
dashboard and the alert rules in ``deploy/`` against this table.

Names follow the conventions of Prometheus: base units, ``_total`` for what only grows. Labels are
bounded: pipelines, tenants, devices, streams, and words from fixed lists. Never an id of a sequence,
group or message: those are in the logs.

What a tenant's process tells carries its id (label ``worker``), though role and pipeline would say
enough: a series then belongs to one process, and its restart is a reset to 0 like any other. A sum over
processes would drop by a part when one ends, which ``rate()`` takes for a reset of the whole.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DEFAULT_ADDRESS = "127.0.0.1:9464"
"""Of ``jigsaw up --metrics`` without an address: the port that OpenTelemetry's exporters took, too."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    name: str
    """As a query names it; a histogram's series have ``_bucket``, ``_sum`` and ``_count`` behind it."""
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, ascending, without infinity."""

    @property
    def series(self) -> tuple[str, ...]:
        """Names that a query may use."""
        if self.kind != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"jigsaw_{name}_total", kind="counter", help=help, labels=labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric(name=f"jigsaw_{name}", kind="gauge", help=help, labels=labels)


def _histogram(name: str, help: str, *labels: str, buckets: tuple[float, ...]) -> Metric:
    return Metric(
        name=f"jigsaw_{name}", kind="histogram", help=help, labels=labels, buckets=buckets
    )


FOLD_BUCKETS = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.5)
"""An event takes tens of microseconds, a decision of a large cluster tens of milliseconds."""

SUBSTAGE_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""From the decoding of one token to an evaluation."""

COMMAND_BUCKETS = (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)

_PROCESS = ("pipeline", "role", "worker")
"""Who tells it: a tenant. Of a scheduler `worker` is its host, of a node its name, and neither has a
pipeline."""

# --- Each process (scheduler, node, tenants) ----------------------------------------------------------

NATS_RECONNECTS = _counter(
    "nats_reconnects", "Times that the connection to NATS was lost and made again.", *_PROCESS
)
NATS_DROPPED = _counter(
    "nats_dropped",
    "Times that the NATS client dropped messages because this process reads too slowly; above 0 is a"
    " fault.",
    *_PROCESS,
)
DEAD_LETTERS_WRITTEN = _counter(
    "dead_letters_written", "Messages that this process could not read or handle.", *_PROCESS
)
COMMAND_SECONDS = _histogram(
    "command_seconds",
    "Time to carry out one command, without the wait for the configuration.",
    *_PROCESS,
    "command",
    buckets=COMMAND_BUCKETS,
)

# --- Nodes ------------------------------------------------------------------------------------------

NODE_TENANTS = _gauge("node_tenants", "Tenant processes that run.", "node")
TENANT_MEMORY = _gauge("tenant_memory_bytes", "Resident memory of a tenant.", *_PROCESS)
TENANT_CPU = _counter("tenant_cpu_seconds", "CPU time of a tenant, user and system.", *_PROCESS)
DISK_FREE = _gauge(
    "disk_free_bytes", "What may still be written where a service keeps its files.", "place"
)
DISK_SIZE = _gauge("disk_size_bytes", "Size of that disk.", "place")

# --- The scheduler: leading, folding, deciding ------------------------------------------------------

LEADS = _gauge("scheduler_leads", "1 where this process leads, 0 where it stands by.")
LEADER_EPOCH = _gauge("scheduler_leader_epoch", "Stream sequence of the leader's election.")
EVENTS_FOLDED = _counter("events_folded", "Events folded since it leads.", "event")
FOLD_SECONDS = _histogram(
    "event_fold_seconds", "Time to fold an event that led to no decision.", buckets=FOLD_BUCKETS
)
DECISION_SECONDS = _histogram(
    "decision_seconds",
    "Time of an event with the decision pass that it led to.",
    buckets=FOLD_BUCKETS,
)
COMMANDS_ISSUED = _counter("commands_issued", "Commands decided since it leads.", "command")
COMMANDS_PENDING = _gauge("commands_pending", "Commands that NATS has not acknowledged yet.")
FOLD_LAG = _gauge("event_lag_messages", "Events that are stored and not folded yet.")
FOLD_LAG_SECONDS = _gauge(
    "event_lag_seconds", "From storing to folding, of the event that was folded last."
)
EVENTS_IGNORED = _counter(
    "events_ignored", "Events, or entries of them, that were stale, repeated or of unknown objects."
)
SNAPSHOT_LAG = _gauge(
    "snapshot_lag_messages",
    "Events folded since the newest stored snapshot: a restart repeats them.",
)
SNAPSHOT_FAILED = _gauge("snapshot_failed", "1 where the last snapshot could not be stored.")
DEAD_LETTERS = _gauge("dead_letters", "Dead letters that are stored.")
STREAM_BYTES = _gauge("stream_bytes", "What a stream holds.", "stream")
STREAM_LIMIT = _gauge("stream_limit_bytes", "What it may hold: publishers wait then.", "stream")
STREAM_MESSAGES = _gauge("stream_messages", "Messages that a stream holds.", "stream")
NODE_UP = _gauge("node_up", "1 where the scheduler hears the node; none of one that left.", "node")

# --- The scheduler: pipelines -----------------------------------------------------------------------

PIPELINE_STATE = _gauge(
    "pipeline_state",
    "1 for the state that a pipeline is in, 0 for the others.",
    "pipeline",
    "state",
)
PIPELINE_PAUSED = _gauge("pipeline_paused", "1 where a client paused it.", "pipeline")
PIPELINE_VERSION = _gauge("pipeline_version", "Steps trained: the newest version.", "pipeline")
PIPELINE_STEPS = _gauge("pipeline_steps", "Steps that it is to train.", "pipeline")
PIPELINE_INCARNATION = _gauge(
    "pipeline_incarnation", "Rises when its trainer goes back to a checkpoint.", "pipeline"
)
REWARD_MEAN = _gauge("reward_mean", "Mean reward of the last step's batch.", "pipeline")
REWARD_STD = _gauge("reward_std", "Standard deviation of those rewards.", "pipeline")
STALENESS = _gauge(
    "staleness_versions",
    "Mean age of the last step's samples, in versions: total, or its part in flight or in the queue.",
    "pipeline",
    "part",
)
STALENESS_MAX = _gauge("staleness_max_versions", "Age of the oldest of them.", "pipeline")
TOKENS_PER_SECOND = _gauge(
    "tokens_per_second", "Trained tokens per second of the last step.", "pipeline"
)
GENERATED_TOKENS = _counter(
    "generated_tokens", "Tokens of sequences that finished, since the leader leads.", "pipeline"
)
TRAINED_TOKENS = _counter("trained_tokens", "Generated tokens that were trained on.", "pipeline")
GROUPS_ADMITTED = _counter("groups_admitted", "Groups of sequences begun.", "pipeline")
GROUPS = _counter("groups", "Groups by the fate that they met.", "pipeline", "fate")
GROUPS_IN_FLIGHT = _gauge("groups_in_flight", "Groups that have met none yet.", "pipeline")
SEQUENCES = _counter("sequences", "Sequences by the fate that they met.", "pipeline", "fate")
SEQUENCES_IN_FLIGHT = _gauge(
    "sequences_in_flight", "Sequences that have met none yet, by stage.", "pipeline", "stage"
)
WORK_WAITING = _gauge(
    "work_waiting",
    "Work that nobody has taken: prompts (groups), generation and scores (sequences).",
    "pipeline",
    "work",
)
SUBSTAGE_SECONDS = _histogram(
    "substage_seconds",
    "Time of one iteration of a sub-stage, as the mean of the half second that told it.",
    "pipeline",
    "kind",
    buckets=SUBSTAGE_BUCKETS,
)
MIGRATIONS = _counter("migrations", "Live sequences that moved between workers.", "pipeline")
MIGRATED_TOKENS = _counter(
    "migrated_tokens", "Tokens that they had then, and nobody made again.", "pipeline"
)
TOKENS_AGAIN = _counter(
    "regenerated_tokens", "Tokens made more than once, because an owner was lost.", "pipeline"
)
EVALUATION_ACCURACY = _gauge("evaluation_accuracy", "Of the last evaluation.", "pipeline")
EVALUATION_VERSION = _gauge("evaluation_version", "Version that it was of.", "pipeline")
EVALUATIONS_SKIPPED = _counter(
    "evaluations_skipped", "Versions due while another was evaluated.", "pipeline"
)
CHECKPOINT_VERSION = _gauge("checkpoint_version", "Of the newest checkpoint.", "pipeline")
CHECKPOINT_TIME = _gauge(
    "checkpoint_timestamp_seconds",
    "When it was committed; absent until this leader has seen one.",
    "pipeline",
)

_WORKER = (*_PROCESS, "device")

WORKER_READY = _gauge("worker_ready", "1 where a worker takes work.", *_WORKER)
WORKER_HELD = _gauge("worker_held", "Sequences, orders or cuts that it works on.", *_WORKER)
SHARE_WANTED = _gauge("share_wanted_ratio", "Share of its device, as commanded last.", *_WORKER)
SHARE_APPLIED = _gauge("share_applied_ratio", "Share that its node last reported.", *_WORKER)
WORKER_EXITS = _counter(
    "worker_exits", "Processes that ended without being told to.", "pipeline", "role"
)

METRICS: tuple[Metric, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Metric)
)


def parse_address(text: str) -> tuple[str, int]:
    """``127.0.0.1:9464`` or ``[::1]:9464``; raises ValueError."""
    host, separator, digits = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not digits.isascii() or not digits.isdigit():
        raise ValueError(f"{text}: give HOST:PORT, as in {DEFAULT_ADDRESS}")
    if int(digits) > 65535:
        raise ValueError(f"{text}: a port is 65535 at most")
    return host, int(digits)


def format_address(host: str, port: int) -> str:
    """The inverse."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
