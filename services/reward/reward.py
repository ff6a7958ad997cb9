"""The reward service: scores finished sequences when the scheduler orders it, and answers of
evaluation workers on request, each in a child process of its own, so that evaluation never delays
training. A repeated order stores the same record under the same id."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import structlog

from jigsawrl.bus.base import MessageTooLargeError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Command, Configure, ScoreOrder, ScoreSequences
from jigsawrl.contract.events import SequencesRewarded
from jigsawrl.contract.message import Ref, Role, message_id
from jigsawrl.contract.parts import SequenceFailure, SequenceReward
from jigsawrl.contract.records import GroupRecord, RewardRecord, SequenceRecord
from jigsawrl.contract.requests import Score, ScoreQuery, Scores
from jigsawrl.models.tokenizer import decode, load_tokenizer
from jigsawrl.tasks import build_task
from jigsawrl.turns import turn_spans
from services.reward.scoring import Result, Sample, Scorer
from services.run import Context, RefusedError
from services.substages import LastWait, SubStages, tell_substages

log = structlog.get_logger()

COMMAND_DEADLINE_S = 20.0
"""Scores of one command, waiting included; with the last sample's deadline well under the 30 s after
which the scheduler takes orders back: where many answers are degenerate the rest fails with a reason,
instead of being ordered again for ever."""


class Reward:
    """Tenant of role ``reward``."""

    role: Role = "reward"
    concurrency = 2

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokenizer: Any = None
        self._training: Scorer | None = None
        self._evaluation: Scorer | None = None
        self._substages = SubStages()
        self._wait = LastWait("reward_wait", self._substages)
        self._version = 0
        """That made the newest token of the sequence that was loaded last."""

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Load the tokenizer and start the scorer; evaluation's starts on first use."""
        try:
            task = await asyncio.to_thread(build_task, config.task, seed=config.seed)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model, task.alphabet)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._training = Scorer(config.task, seed=config.seed)
        self._evaluation = Scorer(config.task, seed=config.seed)
        await self._training.start()

    async def handle(self, command: Command) -> None:
        """Score the ordered sequences."""
        if not isinstance(command, ScoreSequences):
            log.warning("ignored a command that is not for rewards", command=command.id)
            return
        assert self._training is not None
        started_s, begun = time.time(), time.perf_counter()
        loaded = await self._load(command.orders)
        samples = [sample for sample in loaded if isinstance(sample, Sample)]
        scores = iter(await self._training.score(samples, deadline_s=COMMAND_DEADLINE_S))
        results = [
            next(scores) if isinstance(sample, Sample) else Result(None, sample)
            for sample in loaded
        ]
        outcomes = await asyncio.gather(
            *(
                self._store(order, sample, result)
                for order, sample, result in zip(command.orders, loaded, results, strict=True)
            )
        )
        await self._tell(command, outcomes)
        duration_s = time.perf_counter() - begun
        self._wait.ended(version=self._version, started_s=started_s, duration_s=duration_s)

    async def run(self) -> None:
        """Serve evaluation workers, and tell how long scores are waited for."""
        bus, target = self._context.bus, f"{self._context.pipeline}.reward"
        async with asyncio.TaskGroup() as group:
            group.create_task(bus.serve(target, self._score_answers))
            group.create_task(tell_substages(self._context, self._substages, ()))

    async def close(self) -> None:
        """End the scorers."""
        for scorer in (self._training, self._evaluation):
            if scorer is not None:
                await scorer.close()

    async def _load(self, orders: tuple[ScoreOrder, ...]) -> list[Sample | str]:
        prompts: dict[Ref, asyncio.Task[GroupRecord]] = {}
        async with asyncio.TaskGroup() as group:
            for ref in {order.group for order in orders}:
                prompts[ref] = group.create_task(self._context.load(ref))
            records = [group.create_task(self._sample(order, prompts)) for order in orders]
        return [record.result() for record in records]

    async def _sample(
        self, order: ScoreOrder, prompts: dict[Ref, asyncio.Task[Any]]
    ) -> Sample | str:
        """The answer to score, which is the last turn, or why it can't be."""
        prompt, record = await prompts[order.group], await self._context.load(order.record)
        if not isinstance(prompt, GroupRecord) or not isinstance(record, SequenceRecord):
            return "its record is no longer stored, or is of another kind"
        first = record.num_prompt_tokens
        versions = record.versions.tolist()[first:]
        spans = turn_spans(versions)
        if not spans:
            return "its record holds no answer"
        self._version = max(versions)
        begin, end = spans[-1]
        answer = record.tokens.tolist()[first + begin : first + end]
        return Sample(prompt.problem, decode(self._tokenizer, answer))

    async def _store(
        self, order: ScoreOrder, sample: Sample | str, result: Result
    ) -> SequenceReward | SequenceFailure:
        if result.scored is None or isinstance(sample, str):
            log.warning("could not score", sequence=order.sequence, reason=result.error)
            return SequenceFailure(
                sequence=order.sequence, epoch=order.epoch, reason=f"reward: {result.error}"
            )
        record = RewardRecord(
            id=message_id(RewardRecord.tag(), order.sequence, order.epoch),
            pipeline=self._context.pipeline,
            sequence=order.sequence,
            epoch=order.epoch,
            reward=result.scored.reward,
            correct=result.scored.correct,
            response_text=sample.response,
        )
        try:
            ref = await self._context.store(record)
        except MessageTooLargeError as error:
            return SequenceFailure(
                sequence=order.sequence, epoch=order.epoch, reason=f"reward: {error}"
            )
        return SequenceReward(
            sequence=order.sequence, epoch=order.epoch, ref=ref, reward=record.reward
        )

    async def _tell(
        self, command: ScoreSequences, outcomes: list[SequenceReward | SequenceFailure]
    ) -> None:
        await self._context.bus.publish_event(
            SequencesRewarded(
                id=self._context.new_id(SequencesRewarded.tag()),
                cause=command.id,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                rewarded=tuple(o for o in outcomes if isinstance(o, SequenceReward)),
                failed=tuple(o for o in outcomes if isinstance(o, SequenceFailure)),
            )
        )

    async def _score_answers(self, query: ScoreQuery) -> Scores:
        if not isinstance(query, ScoreQuery):
            raise ValueError("the reward service answers ScoreQuery only")
        assert self._evaluation is not None
        samples = [
            Sample(answer.problem, decode(self._tokenizer, answer.tokens.tolist()))
            for answer in query.answers
        ]
        results = await self._evaluation.score(samples)
        return Scores(
            id=message_id(Scores.tag(), query.id),
            cause=query.id,
            scores=tuple(
                None
                if result.scored is None
                else Score(
                    reward=result.scored.reward,
                    correct=result.scored.correct,
                    response_text=sample.response,
                )
                for sample, result in zip(samples, results, strict=True)
            ),
        )
