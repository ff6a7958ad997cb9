"""The reward service of one pipeline: scores finished sequences for training, and answers for
evaluation workers, on two separate pools so that neither starves the other
(PrimeIntellect-ai/prime-rl#1801).

`services.reward.__main__` runs it under `services.run`. Token ids are the truth: the text that a
scorer sees is derived here. It must not know how sequences are made or what rewards are used for.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from jigsawrl.bus.base import MessageTooLargeError, RecordGoneError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Command, Configure, ScoreOrder, ScoreSequences
from jigsawrl.contract.events import SequenceFailure, SequenceReward, SequencesRewarded
from jigsawrl.contract.message import Message, Ref, Role, message_id
from jigsawrl.contract.records import GroupRecord, RewardRecord, SequenceRecord
from jigsawrl.contract.requests import Answer, Score, ScoreQuery, Scores
from jigsawrl.models.tokenizer import decode, load_tokenizer
from jigsawrl.tasks import build_task
from services.reward.frames import Setup
from services.reward.pool import ScorerPool, ScoringError
from services.run import Context, RefusedError

log = structlog.get_logger()

DEADLINE_S = 5.0
"""Per sample; honest scorers take milliseconds."""

ORDER_DEADLINE_S = 25.0
"""Waiting for a scorer included: under the 30 s after which the scheduler takes an order back, so that
slow scorers end as failures with a reason and not as orders given again for ever."""

NUM_TRAINING_SCORERS = 2
"""Two, so that one response that runs into the deadline does not stop the others."""

NUM_EVALUATION_SCORERS = 1
COALESCE_S = 0.02
"""Scores that follow the first within this time travel in one event."""

NUM_LOADS = 32
"""Records loaded at once."""

Outcome = SequenceReward | SequenceFailure


class Reward:
    """The `Tenant` of the role reward."""

    role: Role = "reward"
    concurrency = 8

    def __init__(self, context: Context, *, deadline_s: float = DEADLINE_S) -> None:
        self._context = context
        self._deadline_s = deadline_s
        self._tokenizer: Any = None
        self._training: ScorerPool | None = None
        self._evaluation: ScorerPool | None = None
        self._loads = asyncio.Semaphore(NUM_LOADS)

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Load the tokenizer and make the pools."""
        try:
            task = await asyncio.to_thread(build_task, config.task, seed=config.seed)
            self._tokenizer = await asyncio.to_thread(load_tokenizer, config.model, task.alphabet)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        setup = Setup(task=config.task, seed=config.seed)
        self._training = ScorerPool(
            setup, num_scorers=NUM_TRAINING_SCORERS, deadline_s=self._deadline_s
        )
        self._evaluation = ScorerPool(
            setup, num_scorers=NUM_EVALUATION_SCORERS, deadline_s=self._deadline_s
        )

    async def handle(self, command: Command) -> None:
        """Score the sequences of one command; each is told as soon as it is done."""
        assert isinstance(command, ScoreSequences)
        groups: dict[Ref, asyncio.Task[GroupRecord | None]] = {}
        async with asyncio.TaskGroup() as tasks:
            for order in command.orders:
                if order.group not in groups:
                    groups[order.group] = tasks.create_task(self._load(order.group))
            scoring = {
                tasks.create_task(self._score(order, groups[order.group], cause=command.id))
                for order in command.orders
            }
            while scoring:
                await asyncio.wait(scoring, return_when=asyncio.FIRST_COMPLETED)
                done, scoring = await asyncio.wait(scoring, timeout=COALESCE_S)
                await self._tell([task.result() for task in done], cause=command.id)

    async def run(self) -> None:
        """Answer evaluation workers."""
        await self._context.bus.serve(f"{self._context.pipeline}.reward", self._answer)

    async def close(self) -> None:
        """Kill the scorers."""
        for pool in (self._training, self._evaluation):
            if pool is not None:
                await pool.close()

    async def _tell(self, outcomes: list[Outcome], *, cause: str) -> None:
        await self._context.bus.publish_event(
            SequencesRewarded(
                # A repeat of the command may group its scores otherwise, so no id names a group:
                # the scheduler drops what it knows by (sequence, epoch).
                id=self._context.new_id(SequencesRewarded.tag()),
                cause=cause,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                rewarded=tuple(x for x in outcomes if isinstance(x, SequenceReward)),
                failed=tuple(x for x in outcomes if isinstance(x, SequenceFailure)),
            )
        )

    async def _load(self, ref: Ref) -> Any:
        """The record, or None where it is no longer stored."""
        async with self._loads:
            try:
                return await self._context.bus.load(ref)
            except RecordGoneError:
                return None

    async def _score(
        self, order: ScoreOrder, loading: asyncio.Task[GroupRecord | None], *, cause: str
    ) -> Outcome:
        sequence: SequenceRecord | None = await self._load(order.record)
        group = await loading
        if sequence is None or group is None:
            return _failure(order, "its record is no longer stored")
        tokens = sequence.tokens.tolist()[sequence.num_prompt_tokens :]
        text = decode(self._tokenizer, tokens)
        assert self._training is not None
        try:
            async with asyncio.timeout(ORDER_DEADLINE_S):
                scored = await self._training.score(group.problem, text)
        except TimeoutError:
            return _failure(
                order, f"not scored within {ORDER_DEADLINE_S:g} s: scorers are too slow"
            )
        except ScoringError as error:
            return _failure(order, str(error))
        record = RewardRecord(
            id=message_id(RewardRecord.tag(), order.sequence, order.epoch),
            cause=cause,
            pipeline=self._context.pipeline,
            sequence=order.sequence,
            epoch=order.epoch,
            reward=scored.reward,
            correct=scored.correct,
            response_text=text,
        )
        try:
            ref = await self._context.bus.store(record)
        except MessageTooLargeError as error:
            return _failure(order, str(error))
        return SequenceReward(
            sequence=order.sequence, epoch=order.epoch, ref=ref, reward=scored.reward
        )

    async def _answer(self, query: Message) -> Message:
        if not isinstance(query, ScoreQuery):
            raise ValueError(f"the reward service answers score_query, not {query.tag()}")
        scores = await asyncio.gather(*(self._score_answer(a) for a in query.answers))
        return Scores(id=message_id(Scores.tag(), query.id), cause=query.id, scores=tuple(scores))

    async def _score_answer(self, answer: Answer) -> Score | None:
        text = decode(self._tokenizer, answer.tokens.tolist())
        assert self._evaluation is not None
        try:
            scored = await self._evaluation.score(answer.problem, text)
        except ScoringError as error:
            log.warning("an answer can't be scored", reason=str(error))
            return None
        return Score(reward=scored.reward, correct=scored.correct, response_text=text)


def _failure(order: ScoreOrder, reason: str) -> SequenceFailure:
    return SequenceFailure(
        sequence=order.sequence, epoch=order.epoch, reason=f"{order.sequence}: {reason}"
    )
