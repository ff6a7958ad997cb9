"""What clients ask the leader: submit, cancel, pause, resume, status.

It makes a pipeline's streams and publishes the event; whatever follows is decided by the core when it
folds that event.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from jigsawrl import __version__
from jigsawrl.bus.base import Bus, BusError
from jigsawrl.config import PipelineConfig, decode_config
from jigsawrl.contract.codec import EVENTS, UndecodableError, encode
from jigsawrl.contract.events import (
    PipelineCancelled,
    PipelinePaused,
    PipelineResumed,
    PipelineSubmitted,
)
from jigsawrl.contract.message import Message, message_id
from jigsawrl.contract.requests import (
    Cancel,
    Pause,
    PipelineStatus,
    Resume,
    Status,
    StatusQuery,
    Submit,
    Submitted,
)
from jigsawrl.contract.streams import NEARLY_FULL
from jigsawrl.core.scheduler import Scheduler
from jigsawrl.core.state import Pipeline
from jigsawrl.core.status import node_statuses, pipeline_status
from jigsawrl.memory import needed
from services.scheduler.journal import Journal
from services.scheduler.meanings import Meanings
from services.scheduler.sizing import (
    check_state_bytes,
    data_stream_bytes,
    longest_record_bytes,
    weights_stream_bytes,
)

FOLD_TIMEOUT_S = 5.0
"""How long a request waits for events to be folded: those before it, and the one it leads to."""

FENCE_S = 2.0
"""For so long after the question what the event stream holds is the answer good: well within the
term of a lease, so that no successor can have been elected and have acted."""

COUNT_PERIOD_S = 1.0
"""How often dead letters are counted and streams are looked at."""


class Requests:
    """Answers for one leader."""

    def __init__(self, bus: Bus, scheduler: Scheduler, journal: Journal) -> None:
        self._bus = bus
        self._journal = journal
        self._scheduler = scheduler
        self._submitting = asyncio.Lock()
        self._meanings = Meanings()
        self._num_dead_letters = 0
        self._full: dict[str, list[str]] = {}
        """Per pipeline, or "" for all: what is nearly full."""
        self._counted_s = float("-inf")

    async def handle(self, request: Any) -> Message:
        """One request."""
        if isinstance(request, Submit):
            async with self._submitting:
                return _answer(request, await self._submit(request))
        if isinstance(request, Cancel | Pause | Resume):
            return _answer(request, await self._change(request))
        if isinstance(request, StatusQuery):
            return await self._status(request)
        raise ValueError(f"the scheduler does not answer {request.tag()}")

    async def tell(self, request: Any) -> Message:
        """One request of somebody who may only look: a tenant must not submit or cancel pipelines."""
        if isinstance(request, StatusQuery):
            return await self._status(request)
        raise ValueError(
            f"{request.tag()} is for the target scheduler: this one tells, and does nothing"
        )

    async def _submit(self, request: Submit) -> str | None:
        try:
            config = decode_config(request.config)
        except msgspec.DecodeError as error:
            return f"the submitted configuration can't be read: {error}"
        try:
            await self._fence()
        except BusError as error:
            return str(error)
        event_id = message_id(PipelineSubmitted.tag(), config.name, request.id)
        known = self._scheduler.state.pipelines.get(config.name)
        if known is not None and event_id in known.submissions:
            return None  # A repeated request is no duplicate.
        if known is not None and known.live:
            return (
                f"pipeline {config.name} is already {known.stage}: cancel it or choose another name"
            )
        if known is not None and known.stops:
            return f"pipeline {config.name} is still stopping: try again in a moment"
        try:
            event = _submitted(request, config, id=event_id)
            longest_record_bytes(config)
            check_state_bytes(config, others=self._live_configs())
            await self._delete_ended()
            await self._make_streams(config)
        except (ValueError, msgspec.DecodeError, BusError) as error:
            return str(error)
        await self._folded(await self._bus.publish_event(event))
        return None

    def _live_configs(self) -> list[PipelineConfig]:
        pipelines = self._scheduler.state.pipelines.values()
        return [decode_config(pipeline.config) for pipeline in pipelines if pipeline.live]

    async def _delete_ended(self) -> None:
        """The records and weights of pipelines that ended make room for the next."""
        subjects = self._bus.subjects
        pipelines = self._scheduler.state.pipelines
        for name in [p.name for p in pipelines.values() if not p.live]:
            await self._fence()  # Before each: it may freeze between two of them.
            if not pipelines[name].live:
                streams = (subjects.data_stream(name), subjects.weights_stream(name))
                await self._bus.delete_streams(spec.name for spec in streams)

    async def _make_streams(self, config: PipelineConfig) -> None:
        subjects = self._bus.subjects
        data = subjects.data_stream(config.name, data_stream_bytes(config))
        weights = subjects.weights_stream(config.name, weights_stream_bytes(config))
        await self._fence()
        try:
            await self._bus.create_streams([data, weights])
        except BusError as error:
            needed = data.max_bytes + weights.max_bytes
            raise BusError(f"pipeline {config.name} needs {needed} bytes: {error}") from error

    async def _change(self, request: Cancel | Pause | Resume) -> str | None:
        """Of one pipeline; again to no effect."""
        try:
            await self._fence()
        except BusError as error:
            return str(error)
        known = self._scheduler.state.pipelines.get(request.pipeline)
        if known is None:
            return f"there is no pipeline {request.pipeline}"
        if not known.live and not isinstance(request, Cancel):
            return f"pipeline {request.pipeline} has {known.stage}: submit it again"
        submission = known.submissions[-1] if known.submissions else None
        if known.live and self._meanings.is_meant(request.id, submission=submission):
            event = _change_of(request, submission=submission)
            await self._folded(await self._bus.publish_event(event))
        return None

    async def _status(self, request: StatusQuery) -> Status:
        if time.monotonic() - self._counted_s >= COUNT_PERIOD_S:
            self._counted_s = time.monotonic()
            await self._look_at_streams()
        state = self._scheduler.state
        return Status(
            id=message_id(Status.tag(), request.id),
            cause=request.id,
            leader=state.leader,
            leader_epoch=state.leader_epoch,
            stream_sequence=state.sequence,
            num_dead_letters=self._num_dead_letters,
            pipelines=tuple(self._pipeline(p) for p in state.pipelines.values()),
            nodes=tuple(node_statuses(state)),
            policy=state.policy,
            code_version=__version__,
        )

    def _pipeline(self, pipeline: Pipeline) -> PipelineStatus:
        """What the core knows; the full streams for which publishers may be waiting; and what keeps
        the leader from storing snapshots."""
        status = pipeline_status(self._scheduler.state, pipeline)
        causes = [*self._full.get("", ()), *self._full.get(pipeline.name, ())]
        if self._journal.failure is not None:
            causes.append(self._journal.failure)
        if not pipeline.live or not causes:
            return status
        return msgspec.structs.replace(status, waiting_for=(*causes, *status.waiting_for))

    async def _look_at_streams(self) -> None:
        subjects = self._bus.subjects
        dead = await self._bus.fill(subjects.dead_letters_stream().name)
        self._num_dead_letters = dead.num_messages
        wanted = [("", subjects.events_stream().name), ("", subjects.commands_stream().name)]
        for pipeline in self._scheduler.state.pipelines.values():
            if pipeline.live:
                name = pipeline.name
                wanted += [(name, subjects.data_stream(name).name)]
                wanted += [(name, subjects.weights_stream(name).name)]
        fills = await asyncio.gather(*(self._bus.fill(stream) for _, stream in wanted))
        self._full = {}
        for (name, _), fill in zip(wanted, fills, strict=True):
            if fill.max_bytes and fill.num_bytes > NEARLY_FULL * fill.max_bytes:
                text = f"room in {fill.stream}: {fill.num_bytes} of {fill.max_bytes} bytes in use"
                self._full.setdefault(name, []).append(text)

    async def _fence(self) -> None:
        """Until everything is folded that was stored when the request was taken up. A leader that was
        frozen finds requests that waited for it, and may have a successor: it must meet the election,
        which ends it, before it acts. Raises `BusError` where folding takes too long."""
        stream = self._bus.subjects.events_stream().name
        started_s = time.monotonic()
        while True:
            asked_s = time.monotonic()
            last = (await self._bus.fill(stream)).last_sequence
            await self._folded(last)
            if self._scheduler.state.sequence >= last and time.monotonic() - asked_s < FENCE_S:
                return
            if time.monotonic() - started_s > FOLD_TIMEOUT_S:
                behind = last - self._scheduler.state.sequence
                raise BusError(
                    f"the scheduler is {behind} events behind and can't act on requests yet: try"
                    " again in a moment"
                )

    async def _folded(self, sequence: int) -> None:
        deadline_s = time.monotonic() + FOLD_TIMEOUT_S
        # Polled: folding is the hot path and should not pay for waking the rare waiter.
        while self._scheduler.state.sequence < sequence and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def _answer(request: Submit | Cancel | Pause | Resume, error: str | None) -> Submitted:
    return Submitted(id=message_id(Submitted.tag(), request.id), cause=request.id, error=error)


def _change_of(
    request: Cancel | Pause | Resume, *, submission: str | None
) -> PipelineCancelled | PipelinePaused | PipelineResumed:
    head: dict[str, Any] = {
        "cause": request.id,
        "pipeline": request.pipeline,
        "submission": submission,
    }
    if isinstance(request, Cancel):
        id = message_id(PipelineCancelled.tag(), request.pipeline, request.id)
        return PipelineCancelled(id=id, reason=request.reason, **head)
    event = PipelinePaused if isinstance(request, Pause) else PipelineResumed
    return event(id=message_id(event.tag(), request.pipeline, request.id), **head)


def _submitted(request: Submit, config: PipelineConfig, *, id: str) -> PipelineSubmitted:
    """Raises ValueError where nobody could read the event: numbers that follow from the configuration
    may be too large for it, and who submitted would wait for a pipeline of which nobody heard."""
    event = PipelineSubmitted(
        id=id,
        cause=request.id,
        pipeline=config.name,
        spec=config.spec(needed(config)),
        config=request.config,
        companions=request.companions,
    )
    try:
        EVENTS.decode(encode(event))
    except (UndecodableError, OverflowError) as error:
        raise ValueError(
            f"pipeline {config.name} can't be told to the cluster ({error}): choose smaller numbers"
        ) from error
    return event
