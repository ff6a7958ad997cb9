"""The rollout service: generates the sequences that the scheduler places here, with the weights it
orders, and tells what it accepted, finished and still holds. It decides nothing; it knows neither the
run folder nor the tokenizer: all it needs comes over the bus."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from jigsawrl.bus.base import MessageTooLargeError, RecordGoneError
from jigsawrl.config import AsyncConfig, PipelineConfig
from jigsawrl.contract.commands import (
    Command,
    Configure,
    Drop,
    LoadWeights,
    MigrateSequences,
    Placement,
    PlaceSequences,
)
from jigsawrl.contract.events import (
    Inventory,
    SequencesAccepted,
    SequencesFinished,
    WeightsLoaded,
)
from jigsawrl.contract.message import Ref, Role
from jigsawrl.contract.parts import Held, SequenceFailure, SequenceFinish
from jigsawrl.contract.records import GroupRecord, SequenceRecord
from jigsawrl.models.weights import unpack
from services.rollout.build import build_engine
from services.rollout.engine.base import Generated, Work
from services.rollout.engine_thread import EngineThread, add_what_fits
from services.rollout.handover import hand_over
from services.rollout.holdings import Holding, Holdings, record_of, start_of
from services.rollout.progress import tell_progress
from services.rollout.turns import ToolWait, Turns
from services.run import Context
from services.substages import SubStages, publish_substages, tell_substages

log = structlog.get_logger()

COALESCE_S = 0.02
"""What others wait for goes out as one list within this time."""
INVENTORY_PERIOD_S = 10.0

Outcome = tuple[Holding, Generated] | SequenceFailure


class Rollout:
    """Tenant of role ``rollout``."""

    role: Role = "rollout"
    concurrency = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._engine: EngineThread | None = None
        self._between_turns: Turns | None = None
        self._keep_kv = False
        self._holdings = Holdings()
        self._substages = SubStages()
        self._tool_wait = ToolWait(self._substages)
        self._outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self._loaded: tuple[int, int] | None = None
        """(incarnation, version)."""

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Build the engine; weights come later."""
        engine = await asyncio.to_thread(
            build_engine,
            config,
            device=self._context.device,
            greedy=False,
            tail_sequences=command.tail_sequences,
        )
        self._engine = EngineThread(
            engine,
            on_step=self._on_step,
            on_idle=lambda idle: self._tool_wait.engine_is(idle=idle),
        )
        self._between_turns = Turns(
            self._context,
            config.turns(),
            thread=self._engine,
            tool_wait=self._tool_wait,
            end=lambda holding, generated: self._end(holding, (holding, generated)),
            fail=self._fail,
        )
        self._keep_kv = isinstance(config.mode, AsyncConfig) and config.mode.keep_kv

    async def handle(self, command: Command) -> None:
        """Carry out one command."""
        if isinstance(command, LoadWeights):
            await self._load_weights(command)
        elif isinstance(command, PlaceSequences):
            await self._place(command)
        elif isinstance(command, MigrateSequences):
            await self._hand_over(command)
        elif isinstance(command, Drop):
            gone = [name for name, epoch in command.sequences if self._holdings.remove(name, epoch)]
            await self._drop(gone)
        else:
            log.warning("ignored a command that is not for rollouts", command=command.id)

    async def run(self) -> None:
        """Tell what happens, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._thread.watch())
            group.create_task(self._turns.watch())
            group.create_task(self._tell_outcomes())
            group.create_task(tell_substages(self._context, self._substages, (self._tool_wait,)))
            group.create_task(
                tell_progress(self._context, self._holdings, self._thread, self._turns)
            )
            group.create_task(self._tell_inventory())

    async def close(self) -> None:
        """End the engine's thread."""
        if self._between_turns is not None:
            self._between_turns.close()
        if self._engine is not None:
            await self._engine.close()

    def held(self) -> tuple[Held, ...]:
        """What it holds now."""
        return self._holdings.inventory()

    @property
    def _thread(self) -> EngineThread:
        assert self._engine is not None
        return self._engine

    @property
    def _turns(self) -> Turns:
        assert self._between_turns is not None
        return self._between_turns

    # --- Commands ---------------------------------------------------------------------------------

    async def _load_weights(self, command: LoadWeights) -> None:
        context, wanted = self._context, (command.incarnation, command.version)
        if self._loaded is not None and wanted < self._loaded:
            log.warning("refused older weights", wanted=wanted, loaded=self._loaded)
            return
        if wanted != self._loaded:
            started_s, begun = time.time(), time.perf_counter()
            try:
                manifest, payload = await context.bus.fetch_weights(command.manifest)
            except RecordGoneError:
                log.warning("these weights are gone; newer ones follow", wanted=wanted)
                return
            state = await asyncio.to_thread(unpack, manifest, payload)
            await self._thread.call(
                lambda engine: engine.load_weights(
                    state,
                    model_config=manifest.model_config,
                    version=command.version,
                    keep_kv=self._keep_kv,
                )
            )
            self._loaded = wanted
            self._tool_wait.of_version(command.version)
            self._substages.add(
                "weight_sync",
                version=command.version,
                started_s=started_s,
                duration_s=time.perf_counter() - begun,
                num_tokens=0,
            )
        await context.bus.publish_event(
            WeightsLoaded(
                id=context.new_id(WeightsLoaded.tag()),
                cause=command.id,
                pipeline=context.pipeline,
                worker=context.worker,
                incarnation=command.incarnation,
                version=command.version,
            )
        )
        await self._begin()

    async def _place(self, command: PlaceSequences) -> None:
        if self._loaded is not None and command.incarnation < self._loaded[0]:
            log.warning("refused sequences of an older incarnation", command=command.id)
            return
        new = [p for p in command.placements if not self._holdings.has(p.sequence, p.epoch)]
        groups = await self._get_all({p.group for p in new})
        partial = await self._get_all({p.resume for p in new if p.resume is not None})
        older = [p.sequence for p in new if self._holdings.remove(p.sequence, p.epoch)]
        await self._drop(older)
        for placement in new:
            self._hold(placement, command, groups[placement.group], partial)
        await self._context.bus.publish_event(
            SequencesAccepted(
                id=self._context.new_id(SequencesAccepted.tag()),
                cause=command.id,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                accepted=tuple(Held(p.sequence, p.epoch) for p in command.placements),
            )
        )
        await self._begin()

    def _hold(
        self, placement: Placement, command: PlaceSequences, group: Any, partial: dict[Ref, Any]
    ) -> None:
        if not isinstance(group, GroupRecord):
            reason = f"record {placement.group.sequence} is no longer stored, or is no prompt"
            self._fail(placement, reason)
            return
        resume = None if placement.resume is None else partial[placement.resume]
        if not isinstance(resume, SequenceRecord):
            resume = None
        start = start_of(
            placement.sequence,
            group=group.group,
            seed=placement.seed,
            prompt=group.prompt_tokens.tolist(),
            resume=resume,
            longest_first=command.longest_first,
        )
        self._holdings.add(
            Holding(
                sequence=placement.sequence,
                epoch=placement.epoch,
                group=group.group,
                incarnation=command.incarnation,
                # One that moved here goes on with weights as new as those that made its tokens.
                min_version=max((placement.min_version, *start.versions)),
                start=start,
                problem=group.problem,
                turn_finish_reason=None if resume is None else resume.turn_finish_reason,
                placed_s=time.monotonic(),
            )
        )

    async def _hand_over(self, command: MigrateSequences) -> None:
        answer = await hand_over(self._context, self._thread, self._turns, self._holdings, command)
        for holding, reason in answer.failed:
            self._fail(holding, reason)
        await self._context.bus.publish_event(answer.event)
        for one in answer.event.exported:
            self._holdings.remove(one.sequence, one.epoch)
        await publish_substages(self._context, self._substages, (self._tool_wait,))

    async def _drop(self, sequences: list[str]) -> None:
        """Forget what is no longer held."""
        self._turns.take(sequences)
        await self._thread.call(lambda engine: engine.drop(sequences))

    def _fail(self, one: Placement | Holding, reason: str) -> None:
        self._end(one, _failure(one, reason))

    def _end(self, one: Placement | Holding, outcome: Outcome) -> None:
        self._holdings.end(one.sequence, one.epoch)
        self._outcomes.put_nowait(outcome)

    async def _begin(self) -> None:
        """Give the engine what its weights allow, and what has a turn to its environment."""
        if self._loaded is None:
            return
        ready = []
        for holding in self._holdings.release(*self._loaded):
            reason = holding.turn_finish_reason
            if reason is None:
                ready.append(holding)
            else:
                self._turns.begin(holding, Generated.of(holding.start, finish_reason=reason))
        starts = [holding.start for holding in ready]
        refusals = await self._thread.call(lambda engine: add_what_fits(engine, starts))
        for holding, refusal in zip(ready, refusals, strict=True):
            if refusal is not None:
                self._fail(holding, refusal)

    # --- What happened ----------------------------------------------------------------------------

    def _on_step(self, finished: list[Generated], work: list[Work]) -> None:
        for span in work:
            self._substages.add(
                span.kind,
                version=span.version,
                started_s=span.started_s,
                duration_s=span.duration_s,
                num_tokens=span.num_tokens,
                cpu_s=span.cpu_s,
            )
        for generated in finished:
            holding = self._holdings.get(generated.key)
            if holding is None:
                continue
            if self._turns.has_another(generated):
                self._turns.begin(holding, generated)
            else:
                self._end(holding, (holding, generated))

    async def _tell_outcomes(self) -> None:
        while True:
            outcomes = [await self._outcomes.get()]
            await asyncio.sleep(COALESCE_S)
            while not self._outcomes.empty():
                outcomes.append(self._outcomes.get_nowait())
            told = await asyncio.gather(*map(self._store_outcome, outcomes))
            if all(self._holdings.ends(one.sequence, one.epoch) for one in self.held()):
                # Before the step ends, or it would look short.
                await publish_substages(self._context, self._substages, (self._tool_wait,))
            await self._context.bus.publish_event(
                SequencesFinished(
                    id=self._context.new_id(SequencesFinished.tag()),
                    pipeline=self._context.pipeline,
                    worker=self._context.worker,
                    finished=tuple(one for one in told if isinstance(one, SequenceFinish)),
                    failed=tuple(one for one in told if isinstance(one, SequenceFailure)),
                )
            )
            for one in told:
                self._holdings.told(one.sequence, one.epoch)

    async def _store_outcome(self, outcome: Outcome) -> SequenceFinish | SequenceFailure:
        if isinstance(outcome, SequenceFailure):
            return outcome
        holding, generated = outcome
        assert generated.finish_reason is not None
        record = record_of(holding, generated, pipeline=self._context.pipeline, is_whole=True)
        try:
            ref = await self._context.store(record)
        except MessageTooLargeError as error:
            return _failure(holding, str(error))
        return SequenceFinish(
            sequence=holding.sequence,
            epoch=holding.epoch,
            ref=ref,
            finish_reason=generated.finish_reason,
            num_tokens=len(generated.own_versions),
            min_version=min(generated.own_versions),
            max_version=max(generated.own_versions),
        )

    async def _tell_inventory(self) -> None:
        while True:
            await self._context.bus.publish_event(
                Inventory(
                    id=self._context.new_id(Inventory.tag()),
                    pipeline=self._context.pipeline,
                    worker=self._context.worker,
                    held=self.held(),
                )
            )
            await asyncio.sleep(INVENTORY_PERIOD_S)

    # --- Records ----------------------------------------------------------------------------------

    async def _get_all(self, refs: set[Ref]) -> dict[Ref, Any]:
        """The records; None for those that are gone."""
        ordered = list(refs)
        records = await asyncio.gather(*map(self._context.load, ordered))
        return dict(zip(ordered, records, strict=True))


def _failure(one: Placement | Holding, reason: str) -> SequenceFailure:
    return SequenceFailure(sequence=one.sequence, epoch=one.epoch, reason=f"rollout: {reason}")
