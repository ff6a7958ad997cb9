"""What the environment says between the turns of a sequence. The environment service calls it with
every `TurnQuery`.

An answer is a function of (problem, turns so far), so nothing here need survive a restart. The answers
that are kept save a repeat the wait: who asks again, since an answer was late or the sequence has moved
to another worker, joins the thinking that goes on. They are kept by what was said, not by the turn's
number: a sequence that goes on from an older record under newer weights may say something else there.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jigsawrl.contract.message import Array, message_id
from jigsawrl.contract.requests import Turn, TurnQuery
from jigsawrl.models.tokenizer import decode, encode
from jigsawrl.tasks import Task

TASK_ERRORS = (ValueError, ArithmeticError, LookupError, TypeError, AssertionError)
"""What a task raises when it can't make one problem, or say something to one sequence: that group or
sequence fails, the others go on. Raised further, an order would fail as a whole, and be given again for
ever."""

OBSERVE_DEADLINE_S = 10.0
"""Of the task, from the call on. One that takes longer fails its sequence, and no other."""

OBSERVE_AT_ONCE = 16
"""Calls of the task under way; those over their deadline don't count."""

NUM_KEPT = 4096
"""Answers that a repeat finds; of older ones it would be thought anew, with the same result."""

Key = tuple[str, tuple[bytes, ...]]
"""The sequence and the tokens of its turns."""


class Turns:
    """Of one task."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        *,
        delay_s: float,
        deadline_s: float = OBSERVE_DEADLINE_S,
    ) -> None:
        """`delay_s` simulates an environment that thinks for so long."""
        self._task = task
        self._tokenizer = tokenizer
        self._delay_s = delay_s
        self._deadline_s = deadline_s
        self._free = asyncio.Semaphore(OBSERVE_AT_ONCE)
        self._answers: dict[Key, asyncio.Task[Array | None]] = {}
        self._given: deque[Key] = deque()
        """Of those the ones that are thought out, oldest first."""

    async def answer(self, query: TurnQuery) -> Turn:
        """Raises ValueError where the task can't say anything: that sequence fails, with the reason."""
        if not query.turns:
            raise ValueError(f"sequence {query.sequence}: asks for a turn before its first one")
        key = query.sequence, tuple(turn.data for turn in query.turns)
        if key not in self._answers:
            self._answers[key] = asyncio.create_task(self._observe(query))
            self._answers[key].add_done_callback(lambda _: self._keep(key))
        # Shielded: others may wait for the same answer.
        observation = await asyncio.shield(self._answers[key])
        return Turn(id=message_id(Turn.tag(), query.id), cause=query.id, observation=observation)

    def _keep(self, key: Key) -> None:
        self._given.append(key)
        if len(self._given) > NUM_KEPT:
            del self._answers[self._given.popleft()]

    async def _observe(self, query: TurnQuery) -> Array | None:
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        texts = [decode(self._tokenizer, turn.tolist()) for turn in query.turns]
        where = f"turn {len(texts)} of sequence {query.sequence}"
        try:
            async with self._free, asyncio.timeout(self._deadline_s):
                text = await _in_own_thread(lambda: self._task.observe(query.problem, texts))
        except TASK_ERRORS as error:
            raise ValueError(f"{where}: {type(error).__name__}: {error}") from error
        except TimeoutError:
            raise ValueError(f"{where}: the task took over {self._deadline_s:g} s") from None
        if text is None:
            return None
        tokens = encode(self._tokenizer, text)
        if not tokens:
            raise ValueError(f"{where}: the task answers with an empty text")
        return Array.of("int32", tokens)


async def _in_own_thread(call: Callable[[], str | None]) -> str | None:
    """Nothing ends a thread that hangs. One of a pool would be missing there from then on, and the
    process would wait for it at its end; this one is left to itself."""
    said: Future[str | None] = Future()
    said.set_running_or_notify_cancel()  # so that what comes too late finds a future to go to

    def work() -> None:
        try:
            said.set_result(call())
        except BaseException as error:
            said.set_exception(error)

    threading.Thread(target=work, name="observe", daemon=True).start()
    return await asyncio.wrap_future(said)
