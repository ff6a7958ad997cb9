"""The environment of one pipeline: makes the prompts of groups, and hands out held-out problems.

`services.environment.__main__` runs it under `services.run`. It holds no state that a restart would
lose: a problem follows from (task config, seed, cursor). It must not know who generates or scores.
"""

from __future__ import annotations

import asyncio
from typing import Any

from jigsawrl.bus.base import MessageTooLargeError
from jigsawrl.config import PipelineConfig
from jigsawrl.contract.commands import Command, Configure, GroupOrder, MakeGroups
from jigsawrl.contract.events import GroupFailure, GroupMade, GroupsMade
from jigsawrl.contract.message import Array, Message, Role, message_id
from jigsawrl.contract.records import GroupRecord
from jigsawrl.contract.requests import HeldOut, HeldOutQuery
from jigsawrl.contract.requests import Problem as HeldOutProblem
from jigsawrl.models.tokenizer import encode, load_tokenizer
from jigsawrl.tasks import Problem, Task, build_task
from services.run import Context, RefusedError

MAX_PAGE = 1000
"""Held-out problems in one reply: it must stay far below the server's max_payload."""

GENERATOR_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError, AssertionError)
"""What a generator raises when it cannot make one problem: that group fails, the others go on."""


class Environment:
    """The `Tenant` of the role environment."""

    role: Role = "environment"
    concurrency = 4

    def __init__(self, context: Context) -> None:
        self._context = context
        self._task: Task | None = None
        self._tokenizer: Any = None

    async def configure(self, config: PipelineConfig, command: Configure) -> None:
        """Build the task and load the tokenizer."""
        try:
            self._task = await asyncio.to_thread(build_task, config.task, seed=config.seed)
            self._tokenizer = await asyncio.to_thread(
                load_tokenizer, config.model, self._task.alphabet
            )
        except ValueError as error:
            raise RefusedError(str(error)) from error

    async def handle(self, command: Command) -> None:
        """Make the groups of one command, all at once; one event answers them."""
        assert isinstance(command, MakeGroups)
        prompts = await asyncio.to_thread(self._make, command.orders)
        results = await asyncio.gather(
            *(self._store(order, prompt, cause=command.id) for order, prompt in prompts)
        )
        await self._context.bus.publish_event(
            GroupsMade(
                # Named by the command: a repeat of it makes the same groups.
                id=message_id(GroupsMade.tag(), self._context.worker.boot, command.id),
                cause=command.id,
                pipeline=self._context.pipeline,
                worker=self._context.worker,
                made=tuple(result for result in results if isinstance(result, GroupMade)),
                failed=tuple(result for result in results if isinstance(result, GroupFailure)),
            )
        )

    async def run(self) -> None:
        """Answer evaluation workers."""
        await self._context.bus.serve(f"{self._context.pipeline}.environment", self._answer)

    async def close(self) -> None:
        """Nothing is open."""

    def _make(
        self, orders: tuple[GroupOrder, ...]
    ) -> list[tuple[GroupOrder, tuple[Problem, list[int]] | str]]:
        """Each order with its problem and prompt tokens, or with why it has none. In a thread."""
        assert self._task is not None
        made: list[tuple[GroupOrder, tuple[Problem, list[int]] | str]] = []
        for order in orders:
            try:
                problem = self._task.train(order.cursor)
                made.append((order, (problem, self._tokens(problem))))
            except GENERATOR_ERRORS as error:
                made.append((order, f"training prompt {order.cursor}: {error}"))
        return made

    def _tokens(self, problem: Problem) -> list[int]:
        tokens = encode(self._tokenizer, problem.prompt)
        if not tokens:
            raise ValueError(f"the prompt {problem.prompt!r} has no tokens")
        return tokens

    async def _store(
        self, order: GroupOrder, prompt: tuple[Problem, list[int]] | str, *, cause: str
    ) -> GroupMade | GroupFailure:
        if isinstance(prompt, str):
            return GroupFailure(group=order.group, epoch=order.epoch, reason=prompt)
        problem, tokens = prompt
        record = GroupRecord(
            id=message_id(GroupRecord.tag(), order.group, order.epoch),
            cause=cause,
            pipeline=self._context.pipeline,
            group=order.group,
            epoch=order.epoch,
            cursor=order.cursor,
            prompt_tokens=Array.of("int32", tokens),
            prompt_text=problem.prompt,
            problem=problem.fields,
        )
        try:
            ref = await self._context.bus.store(record)
        except MessageTooLargeError as error:
            return GroupFailure(group=order.group, epoch=order.epoch, reason=str(error))
        return GroupMade(
            group=order.group, epoch=order.epoch, ref=ref, num_prompt_tokens=len(tokens)
        )

    async def _answer(self, query: Message) -> Message:
        if not isinstance(query, HeldOutQuery):
            raise ValueError(f"the environment answers held_out_query, not {query.tag()}")
        assert self._task is not None
        total = self._task.num_held_out
        if not (0 <= query.start <= total and 0 <= query.count <= MAX_PAGE):
            raise ValueError(
                f"held-out problems {query.start} to {query.start + query.count}: ask for at most"
                f" {MAX_PAGE} between 0 and {total}"
            )
        indices = range(query.start, min(query.start + query.count, total))
        problems = await asyncio.to_thread(lambda: tuple(self._held_out(i) for i in indices))
        return HeldOut(
            id=message_id(HeldOut.tag(), query.id), cause=query.id, problems=problems, total=total
        )

    def _held_out(self, index: int) -> HeldOutProblem:
        assert self._task is not None
        problem = self._task.held_out(index)
        return HeldOutProblem(
            prompt_tokens=Array.of("int32", self._tokens(problem)),
            prompt_text=problem.prompt,
            problem=problem.fields,
        )
