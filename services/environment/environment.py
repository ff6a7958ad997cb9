"""The environment service: makes the prompts of groups when the scheduler orders them, and gives
held-out problems to evaluation workers, and says what comes between the turns of a sequence. It decides
nothing and keeps nothing that a restart would lose: a prompt is a function of (task, seed, cursor), so
a repeated order stores the same record under the same id, and what it says one of the turns so far."""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from jigsawrl.bus.base import MessageTooLargeError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Command, Configure, GroupOrder, MakeGroups
from jigsawrl.contract.events import GroupsMade
from jigsawrl.contract.message import Array, Role, message_id
from jigsawrl.contract.parts import GroupFailure, GroupMade
from jigsawrl.contract.records import GroupRecord
from jigsawrl.contract.requests import HeldOut, HeldOutQuery, Turn, TurnQuery
from jigsawrl.contract.requests import Problem as HeldOutProblem
from jigsawrl.models.tokenizer import encode, load_tokenizer
from jigsawrl.observe import about
from jigsawrl.tasks import Problem, Task, build_task
from services.environment.turns import TASK_ERRORS, Turns
from services.run import Context, RefusedError

log = structlog.get_logger()

REQUESTS_AT_ONCE = 4096
"""Requests wait for the environment's thinking and use nothing meanwhile."""


class Environment:
    """Tenant of role ``environment``."""

    role: Role = "environment"
    concurrency = 1

    def __init__(self, context: Context) -> None:
        self._context = context
        self._task: Task | None = None
        self._tokenizer: Any = None
        self._turns: Turns | None = None

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Build the task and the tokenizer."""
        try:
            self._task = await asyncio.to_thread(build_task, config.task, seed=config.seed)
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, config.model, self._task.alphabet
            )
            encode(self._tokenizer, self._task.train(0).prompt)
        except ValueError as error:
            raise RefusedError(str(error)) from error
        self._turns = Turns(self._task, self._tokenizer, delay_s=config.turns().delay_s)

    async def handle(self, command: Command) -> None:
        """Make the ordered groups."""
        if not isinstance(command, MakeGroups):
            log.warning("ignored a command that is not for environments", command=command.id)
            return
        context = self._context
        results = await asyncio.gather(*(self._make(order) for order in command.orders))
        await context.bus.publish_event(
            GroupsMade(
                id=context.new_id(GroupsMade.tag()),
                cause=command.id,
                pipeline=context.pipeline,
                worker=context.worker,
                made=tuple(r for r in results if isinstance(r, GroupMade)),
                failed=tuple(r for r in results if isinstance(r, GroupFailure)),
            )
        )

    async def run(self) -> None:
        """Serve held-out problems and turns."""
        await self._context.bus.serve(
            f"{self._context.pipeline}.environment", self._answer, concurrency=REQUESTS_AT_ONCE
        )

    async def close(self) -> None:
        """Nothing is held."""

    async def _make(self, order: GroupOrder) -> GroupMade | GroupFailure:
        assert self._task is not None
        try:
            problem = await asyncio.to_thread(self._task.train, order.cursor)
            tokens = encode(self._tokenizer, problem.prompt)
        except TASK_ERRORS as error:
            return _failure(order, error)
        record = GroupRecord(
            id=message_id(GroupRecord.tag(), order.group, order.epoch),
            pipeline=self._context.pipeline,
            group=order.group,
            epoch=order.epoch,
            cursor=order.cursor,
            prompt_tokens=Array.of("int32", tokens),
            prompt_text=problem.prompt,
            problem=problem.fields,
        )
        try:
            ref = await self._context.store(record)
        except MessageTooLargeError as error:
            return _failure(order, error)
        return GroupMade(
            group=order.group, epoch=order.epoch, ref=ref, num_prompt_tokens=len(tokens)
        )

    async def _answer(self, query: HeldOutQuery | TurnQuery) -> HeldOut | Turn:
        if isinstance(query, TurnQuery):
            assert self._turns is not None
            with about(sequence=query.sequence):
                return await self._turns.answer(query)
        if isinstance(query, HeldOutQuery):
            return self._held_out(query)
        raise ValueError("the environment answers HeldOutQuery and TurnQuery only")

    def _held_out(self, query: HeldOutQuery) -> HeldOut:
        assert self._task is not None
        if query.count < 1:
            raise ValueError("count must be 1 or more")
        end = min(query.start + query.count, self._task.num_held_out)
        problems = [self._task.held_out(index) for index in range(query.start, end)]
        return HeldOut(
            id=message_id(HeldOut.tag(), query.id),
            cause=query.id,
            problems=tuple(self._held_out_problem(problem) for problem in problems),
            total=self._task.num_held_out,
        )

    def _held_out_problem(self, problem: Problem) -> HeldOutProblem:
        return HeldOutProblem(
            prompt_tokens=Array.of("int32", encode(self._tokenizer, problem.prompt)),
            prompt_text=problem.prompt,
            problem=problem.fields,
        )


def _failure(order: GroupOrder, error: Exception) -> GroupFailure:
    return GroupFailure(
        group=order.group, epoch=order.epoch, reason=f"training prompt {order.cursor}: {error}"
    )
