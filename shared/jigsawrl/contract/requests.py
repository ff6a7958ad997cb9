"""Core NATS requests and replies, and telemetry: what may be lost without harm, or is asked again."""

from __future__ import annotations

from typing import Literal

import msgspec

from jigsawrl.contract.message import Array, CodeVersion, Count, Message, Role

# --- To the leader (subject: see `Subjects.request`) ----------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """Run a pipeline; `config` is the resolved config (MessagePack). Answered by `Submitted`."""

    config: bytes
    companions: tuple[str, ...] = ()
    """Pipelines that it begins its work together with, submitted before or after it."""


class Submitted(Message, frozen=True, kw_only=True):
    """`error` is None where the pipeline was accepted, else one line that says what to do."""

    error: str | None


class Cancel(Message, frozen=True, kw_only=True):
    """End a pipeline; answered by `Submitted`."""

    pipeline: str
    reason: str


class Pause(Message, frozen=True, kw_only=True):
    """Begin nothing more of a pipeline until `Resume`; answered by `Submitted`."""

    pipeline: str


class Resume(Message, frozen=True, kw_only=True):
    """Let a paused pipeline go on; answered by `Submitted`."""

    pipeline: str


class StatusQuery(Message, frozen=True, kw_only=True):
    """Ask the leader for the state of all pipelines; answered by `Status`."""


class FateCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Conservation: admitted = trained + filtered + stale + discarded + failed + in_flight."""

    admitted: Count = 0
    trained: Count = 0
    filtered: Count = 0
    stale: Count = 0
    discarded: Count = 0
    failed: Count = 0
    in_flight: Count = 0


class EvaluationResult(msgspec.Struct, frozen=True, kw_only=True):
    """One finished evaluation."""

    version: Count
    accuracy: float
    num_problems: Count
    mean_reward: float


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant."""

    worker: str
    role: Role
    device: str | None
    state: Literal["starting", "configuring", "ready", "lost"]
    version: Count | None
    num_held: Count
    """Sequences (rollout), orders (environment, reward) or cuts (trainer) it works on."""
    share: float | None = None
    """Of its device, as its node last applied it."""
    code_version: CodeVersion = ""


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One machine's supervisor."""

    node: str
    state: Literal["up", "away", "left", "refused"]
    """``away``: it is silent; ``left``: it said that it stops."""
    devices: tuple[str, ...]
    schema_version: int
    code_version: CodeVersion
    silent_s: float
    """Stream time since it was heard last."""
    clock_skew_s: float | None
    """Its wall clock less the server's, when it was heard last; None where it does not tell."""
    refused: str | None = None
    """Why it gets no work, and what to do."""


class PipelineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline."""

    pipeline: str
    state: Literal["queued", "starting", "running", "finishing", "finished", "failed"]
    version: Count
    incarnation: Count
    num_steps: Count
    groups: FateCounts
    sequences: FateCounts
    evaluations: tuple[EvaluationResult, ...]
    num_evaluations_skipped: Count
    metrics: dict[str, float]
    """Of the last step."""
    num_trained_tokens: Count
    running_s: float
    """Stream time since version 0 was published."""
    waiting_for: tuple[str, ...]
    """What the next step waits for, by id; one entry a cause."""
    workers: tuple[WorkerStatus, ...]
    failure: str | None
    paused: bool = False
    """By a client: nothing more begins."""
    num_migrations: Count = 0
    """Live sequences that went from one worker to another."""
    num_migrated_tokens: Count = 0
    """Tokens that they had then, and that nobody generated again."""
    num_tokens_again: Count = 0
    """Tokens of finished sequences that may have been generated more than once, because an owner was
    lost before it could hand them over: an upper bound."""
    num_ignored: Count = 0
    """Its events, or entries of them, that were stale, repeated or of unknown objects."""


class Status(Message, frozen=True, kw_only=True):
    """All pipelines the leader knows."""

    leader: str
    leader_epoch: Count
    stream_sequence: Count
    """Last event folded."""
    num_dead_letters: Count
    pipelines: tuple[PipelineStatus, ...]
    nodes: tuple[NodeStatus, ...] = ()
    policy: str = ""
    code_version: CodeVersion = ""
    """Of the leader; its schema is that of this message."""


# --- Between an evaluation worker and its pipeline's environment ------------------------------------


class HeldOutQuery(Message, frozen=True, kw_only=True):
    """Ask the environment for held-out problems `start` .. `start + count - 1`."""

    start: Count
    count: Count


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out problem."""

    prompt_tokens: Array
    """int32 [P]."""
    prompt_text: str
    problem: dict[str, str]


class HeldOut(Message, frozen=True, kw_only=True):
    """Answers `HeldOutQuery`; `total` is the size of the whole held-out set."""

    problems: tuple[Problem, ...]
    total: Count


# --- Between a rollout or evaluation worker and its pipeline's environment --------------------------


class TurnQuery(Message, frozen=True, kw_only=True):
    """Ask the environment what it says to the turns of a sequence so far; answered by `Turn`.

    The answer depends on `problem` and `turns` only, and a repeat under the same `sequence` gets the
    same without the environment doing its work again: so a sequence may move while it waits."""

    sequence: str
    problem: dict[str, str]
    turns: tuple[Array, ...]
    """int32 [T] each: the generated tokens of every turn so far."""


class Turn(Message, frozen=True, kw_only=True):
    """Answers `TurnQuery`."""

    observation: Array | None
    """int32 [O], at least one: what the next turn comes after. None where the episode is over."""


# --- Between an evaluation worker and its pipeline's reward -----------------------------------------


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to score."""

    problem: dict[str, str]
    tokens: Array
    """int32 [T], generated tokens of the last turn only."""


class ScoreQuery(Message, frozen=True, kw_only=True):
    """Ask the reward service to score answers; answered by `Scores`."""

    answers: tuple[Answer, ...]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One score; `correct` is what accuracy counts."""

    reward: float
    correct: bool
    response_text: str


class Scores(Message, frozen=True, kw_only=True):
    """Answers `ScoreQuery`, in order; an answer that can't be scored is None."""

    scores: tuple[Score | None, ...]


class RequestRefused(Message, frozen=True, kw_only=True):
    """Answers any request that can't be served, with the reason."""

    reason: str


# --- Telemetry -----------------------------------------------------------------------------------


class Activity(Message, frozen=True, kw_only=True):
    """For people: what a worker is doing now (warm-up, loading, a phase of a step)."""

    pipeline: str
    worker: str
    activity: str
    num_done: Count
    num_total: Count | None
    detail: str


RequestType = Submit | Cancel | Pause | Resume | StatusQuery | HeldOutQuery | TurnQuery | ScoreQuery
ReplyType = Submitted | Status | HeldOut | Turn | Scores | RequestRefused
TelemetryType = Activity
