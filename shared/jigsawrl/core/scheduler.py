"""The decision machine: `Scheduler.handle(event) -> list[Command]`, a pure object.

The live service and the simulator are two loops around it. Folding an event only changes the state
and marks its pipeline; the decision pass runs over marked pipelines at most every 20 ms of stream
time, or on a tick, so that commands are lists. It knows no clock, no bus and no randomness: the same
messages give the same commands, byte for byte, from any snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from jigsawrl.contract import events
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import Event
from jigsawrl.contract.message import Ledger
from jigsawrl.core import (
    admission,
    batching,
    dispatch,
    evaluation,
    filtering,
    groups,
    history,
    introductions,
    migration,
    nodes,
    pipelines,
    profiles,
    relocation,
    room,
    shares,
    workers,
)
from jigsawrl.core.outbox import Outbox
from jigsawrl.core.policies import POLICIES
from jigsawrl.core.policies.base import Policy, Start
from jigsawrl.core.state import Pipeline, State, Tenant
from jigsawrl.core.terms import contradiction

DECISION_PERIOD_S = 0.02
"""Least stream time between two decision passes that no tick asked for."""

LEASE_CHECK_PERIOD_S = 0.5
"""How often a pipeline's leases are looked through, on ticks."""

_QUIET = (events.SubStagesEnded, events.SequencesProgressed)
"""Events of a pipeline that no decision depends on."""

_decoder = msgspec.msgpack.Decoder(State)


class Scheduler:
    """Decides for all pipelines."""

    def __init__(
        self, *, state: State | None = None, policies: Mapping[str, Policy] = POLICIES
    ) -> None:
        """`policies` are those that an elected leader may name."""
        self.state = State() if state is None else state
        self._policies = policies
        self._of_cluster: dict[type[Event], Callable[[Any], None]] = {
            events.LeaderElected: self._leader_elected,
            events.Tick: self._tick,
            events.NodeStarted: lambda e: introductions.started(self.state, e),
            events.NodeLeaving: lambda e: nodes.leaving(self.state, e),
            events.TenantStopped: lambda e: nodes.tenant_stopped(self.state, e),
            events.NodeStopped: lambda e: introductions.stopped(self.state, e),
            events.Heartbeat: lambda e: introductions.heard(self.state, e),
            events.SharesApplied: lambda e: shares.applied(self.state, e),
            events.PipelineSubmitted: self._submitted,
        }
        self._of_pipeline: dict[type[Event], Callable[[Pipeline, Any], None]] = {
            events.PipelineCancelled: self._cancelled,
            events.PipelinePaused: self._paused,
            events.PipelineResumed: self._resumed,
            events.WorkerStarted: self._worker_started,
            events.WorkerExited: lambda p, e: workers.exited(self.state, p, e),
            events.WorkerFailed: self._worker_failed,
            events.WorkerReady: self._worker_ready,
            events.WorkerRefused: self._worker_refused,
            events.WorkerAlive: self._alive,
            events.Inventory: self._inventory,
            events.SubStagesEnded: lambda p, e: batching.measure(self.state, p, e),
            events.GroupsMade: lambda p, e: groups.made(self.state, p, e),
            events.SequencesAccepted: lambda p, e: groups.accepted(self.state, p, e),
            events.SequencesProgressed: lambda p, e: groups.progressed(self.state, p, e),
            events.SequencesFinished: lambda p, e: groups.finished(self.state, p, e),
            events.SequencesExported: lambda p, e: migration.exported(self.state, p, e),
            events.SequencesRewarded: lambda p, e: groups.rewarded(self.state, p, e),
            events.WeightsLoaded: lambda p, e: workers.loaded(self.state, p, e),
            events.VersionPublished: lambda p, e: history.published(self.state, p, e),
            events.CheckpointCommitted: lambda p, e: history.checkpointed(self.state, p, e),
            events.EvaluationFinished: lambda p, e: evaluation.finished(self.state, p, e),
            events.EvaluationFailed: lambda p, e: evaluation.failed(self.state, p, e),
        }

    @classmethod
    def restore(cls, snapshot: bytes, *, policies: Mapping[str, Policy] = POLICIES) -> Scheduler:
        """A scheduler that goes on from a snapshot; raises ValueError where it is none."""
        try:
            return cls(state=_decoder.decode(snapshot), policies=policies)
        except msgspec.DecodeError as error:
            raise ValueError(
                f"the state can't be read by this version of the code: {error}"
            ) from error

    def snapshot(self) -> bytes:
        """All it knows; goes on after `state.sequence`."""
        return msgspec.msgpack.encode(self.state)

    @property
    def _policy(self) -> Policy:
        return self._policies[self.state.policy]

    @property
    def decision_due(self) -> bool:
        """A decision waits for the next message: the leader should not wait long with a tick."""
        return self.state.decision_due

    def handle(self, event: Event, *, timestamp_s: float, sequence: int) -> list[Command]:
        """Fold one message of the event stream, stored as `sequence` at `timestamp_s`; what to
        command because of it."""
        state = self.state
        now_s = state.clock.advance(timestamp_s)
        state.sequence = sequence
        self._fold(event)
        if not state.decision_due:
            return []
        if not isinstance(event, events.Tick) and now_s - state.decided_s < DECISION_PERIOD_S:
            return []
        outbox = Outbox(sequence=sequence, cause=event.id, leader_epoch=state.leader_epoch)
        self._decide(outbox)
        return outbox.commands

    # --- Folding ---------------------------------------------------------------------------------

    def _fold(self, event: Event) -> None:
        of_cluster = self._of_cluster.get(type(event))
        if of_cluster is not None:
            of_cluster(event)
            return
        pipeline = self.state.pipelines.get(event.pipeline or "")
        if pipeline is None:
            self.state.num_ignored += 1
            return
        before = self.state.num_ignored
        if not pipeline.live:
            self._after_end(pipeline, event)
        else:
            self._of_pipeline[type(event)](pipeline, event)
            if not isinstance(event, _QUIET):
                self.state.touch(pipeline)
        pipeline.num_ignored += self.state.num_ignored - before

    def _after_end(self, pipeline: Pipeline, event: Event) -> None:
        """A tenant that starts after its pipeline's end is stopped; all else is ignored."""
        self.state.num_ignored += 1
        if isinstance(event, events.WorkerStarted) and event.worker.id in pipeline.tenants:
            pipeline.stops.append(event.worker.id)
            self.state.touch(pipeline)

    def _leader_elected(self, event: events.LeaderElected) -> None:
        self.state.leader = event.leader
        self.state.leader_epoch = self.state.sequence
        introductions.led_by(self.state, event)
        if event.policy in self._policies and event.policy != self.state.policy:
            self.state.policy = event.policy
            self.state.undivided = dict.fromkeys(self.state.residents, True)
        if event.profile is not None:
            self.state.profile = event.profile

    def _worker_started(self, pipeline: Pipeline, event: events.WorkerStarted) -> None:
        why = introductions.refusal(self.state, event.schema, event.worker.id)
        if why is None:
            workers.started(self.state, pipeline, event)
        elif event.worker.id in pipeline.tenants:
            pipelines.fail(self.state, pipeline, why)
        else:  # started by hand: whoever did that finds it without work
            self.state.num_ignored += 1

    def _submitted(self, event: events.PipelineSubmitted) -> None:
        live = [p.spec for p in self.state.pipelines.values() if p.live]
        pipeline = pipelines.submitted(self.state, event)
        if pipeline is None:
            return
        why = contradiction(
            event.spec, live, policy=self.state.policy, keeps_terms=self._policy.keeps_terms
        )
        if why is not None:
            pipelines.fail(self.state, pipeline, why)

    def _tick(self, event: events.Tick) -> None:
        state = self.state
        nodes.check(state)
        for pipeline in state.pipelines.values():
            if (
                pipeline.active
                and state.clock.now_s - pipeline.leases_checked_s >= LEASE_CHECK_PERIOD_S
            ):
                pipeline.leases_checked_s = state.clock.now_s
                dispatch.expire(state, pipeline)
                workers.expire_loads(state, pipeline)
                workers.expire_silent(state, pipeline)
                if pipeline.waits_for is not None or relocation.is_needed(pipeline):
                    state.touch(pipeline)
        for name in self._policy.awaits(state):
            state.touch(state.pipelines[name])

    def _cancelled(self, pipeline: Pipeline, event: events.PipelineCancelled) -> None:
        if self._is_meant(pipeline, event):
            pipelines.fail(self.state, pipeline, f"cancelled: {event.reason}")

    def _paused(self, pipeline: Pipeline, event: events.PipelinePaused) -> None:
        if self._is_meant(pipeline, event):
            pipelines.pause(pipeline)

    def _resumed(self, pipeline: Pipeline, event: events.PipelineResumed) -> None:
        if self._is_meant(pipeline, event):
            pipelines.resume(self.state, pipeline)

    def _is_meant(
        self,
        pipeline: Pipeline,
        event: events.PipelineCancelled | events.PipelinePaused | events.PipelineResumed,
    ) -> bool:
        """False where it meant an earlier one of this name."""
        if event.submission in (None, *pipeline.submissions[-1:]):
            return True
        self.state.num_ignored += 1
        return False

    def _worker_ready(self, pipeline: Pipeline, event: events.WorkerReady) -> None:
        if not workers.ready(self.state, pipeline, event):
            return
        if pipeline.tenants[event.worker.id].role == "trainer" and pipeline.gang_ready:
            ledger = event.ledger or Ledger()
            history.trainer_ready(self.state, pipeline, event.version or 0, ledger)

    def _worker_refused(self, pipeline: Pipeline, event: events.WorkerRefused) -> None:
        if workers.current(pipeline, event.worker) is None:
            self.state.num_ignored += 1
        else:
            pipelines.fail(self.state, pipeline, f"{event.worker.id}: {event.reason}")

    def _worker_failed(self, pipeline: Pipeline, event: events.WorkerFailed) -> None:
        tenant = pipeline.tenants.get(event.worker.id)
        boots = (None, event.worker.boot)
        if tenant is None or (
            tenant.boot not in boots and event.worker.boot not in tenant.past_boots
        ):
            self.state.num_ignored += 1
        else:
            pipelines.fail(self.state, pipeline, f"{event.worker.id}: {event.reason}")

    def _alive(self, pipeline: Pipeline, event: events.WorkerAlive) -> None:
        workers.heard(self.state, pipeline, event.worker)

    def _inventory(self, pipeline: Pipeline, event: events.Inventory) -> None:
        if workers.heard(self.state, pipeline, event.worker):
            groups.inventory(pipeline, event)

    # --- Deciding --------------------------------------------------------------------------------

    def _decide(self, outbox: Outbox) -> None:
        state = self.state
        state.decided_s = state.clock.now_s
        # Who waits for another's end or start must see it in the same pass: the devices are idle.
        waiting = [p.name for p in state.pipelines.values() if p.active and p.waits_for is not None]
        dirty, state.dirty = list(state.dirty), {}
        nodes.stop_strays(state, outbox)
        for name in dict.fromkeys([*dirty, *waiting]):
            self._decide_pipeline(state.pipelines[name], outbox)
        policy = self._policy
        moved = [
            name for name in dirty if relocation.relocate(state, state.pipelines[name], outbox)
        ]
        starts = policy.starts(state)
        for start in starts:
            _start(state, state.pipelines[start.pipeline], start)
        shares.command(state, policy.shares(state), outbox)
        state.undivided = {}
        for name in dict.fromkeys([*moved, *(start.pipeline for start in starts)]):
            self._decide_pipeline(state.pipelines[name], outbox)
        nodes.release(state, outbox)

    def _decide_pipeline(self, pipeline: Pipeline, outbox: Outbox) -> None:
        now_s = self.state.clock.now_s
        pipelines.give_up(self.state, pipeline)
        if pipeline.stage == "queued":
            why = room.never_fits(self.state, pipeline)
            if why is not None:
                pipelines.fail(self.state, pipeline, why)
        if pipeline.active:
            migration.hand_over(pipeline, now_s, outbox)
            nodes.restart_tenants(self.state, pipeline, outbox)
            nodes.start_tenants(self.state, pipeline, outbox, pinned=self._policy.pins)
            workers.configure(pipeline, outbox)
            history.publish(pipeline, outbox)
            workers.load_weights(pipeline, now_s, outbox)
            filtering.filter_uniform(self.state, pipeline)
            batching.cut(pipeline, now_s)
            batching.send(pipeline, outbox)
            admission.admit(pipeline)
            dispatch.drop(pipeline, outbox)
            dispatch.make(pipeline, now_s, outbox)
            self._place(pipeline, outbox)
            migration.migrate(pipeline, self._policy.moves(self.state, pipeline), now_s, outbox)
            dispatch.score(pipeline, now_s, outbox)
            if pipeline.waits_for is None:
                evaluation.evaluate(pipeline, outbox)
            pipelines.finish(self.state, pipeline)
        nodes.stop_tenants(self.state, pipeline, outbox)

    def _place(self, pipeline: Pipeline, outbox: Outbox) -> None:
        """Unless others come first: then the prompts are made meanwhile, which takes no device."""
        pipeline.waits_for = (
            pipelines.why_paused(pipeline)
            or pipelines.missing_companion(self.state, pipeline)
            or self._policy.turn(self.state, pipeline)
        )
        if pipeline.waits_for is None:
            dispatch.place(
                pipeline,
                self.state.clock.now_s,
                outbox,
                workers=self._policy.workers(self.state, pipeline),
                longest_first=self._policy.longest_first(pipeline),
            )


def _start(state: State, pipeline: Pipeline, start: Start) -> None:
    pipeline.stage = "starting"
    for place in start.places:
        pipeline.tenants[place.tenant] = Tenant(
            id=place.tenant, role=place.role, node=place.node, device=place.device
        )
    shares.move_in(state, pipeline)
    profiles.note_tail(state, pipeline)
