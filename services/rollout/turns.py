"""Between two turns: asks the environment what it says to the turns so far, and lets the sequence go
on.

`rollout` has it hold the sequences that wait, which use no slot of the engine meanwhile; `evaluation`
asks with `ask`. An environment that is away is waited for, and the log says so: the node starts it
again, and the answer, a function of what was said so far, is the one that the old one would have given.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec
import structlog

from jigsawrl.bus.base import BusError, NoAnswerError
from jigsawrl.config_task import TaskTurns
from jigsawrl.contract.message import Array
from jigsawrl.contract.requests import Turn, TurnQuery
from jigsawrl.observe import about
from jigsawrl.turns import turn_spans
from services.rollout.engine.base import Generated, SequenceStart
from services.rollout.engine_thread import EngineThread, add_what_fits
from services.rollout.holdings import Holding
from services.run import Context
from services.substages import SubStages, Wait

log = structlog.get_logger()

ANSWER_TIMEOUT_S = 5.0
"""Of one try, beside the environment's own delay: then a line says what is waited for."""

MAX_UNANSWERED = 12
"""Tries in a row that a living environment may leave unanswered: a minute, in which one that hangs as a
whole would have been lost and started again. Then the turn is at fault, and its sequence fails."""


class TurnError(Exception):
    """The environment can't go on with this sequence; the text is the reason, in one line."""


async def ask(
    context: Context,
    sequence: str,
    *,
    problem: dict[str, str],
    generated: Generated,
    delay_s: float,
) -> list[int] | None:
    """The tokens of the environment's answer to the turns so far; None where the episode is over."""
    spans = turn_spans(generated.versions)
    query = TurnQuery(
        id=context.new_id(TurnQuery.tag()),
        sequence=sequence,
        problem=problem,
        turns=tuple(Array.of("int32", generated.tokens[begin:end]) for begin, end in spans),
    )
    begun, num_unanswered = time.monotonic(), 0
    while True:
        try:
            turn = await context.bus.request(
                f"{context.pipeline}.environment", query, timeout_s=delay_s + ANSWER_TIMEOUT_S
            )
        except NoAnswerError as error:
            num_unanswered = num_unanswered + 1 if error.is_served else 0
            waited_s = round(time.monotonic() - begun)
            if num_unanswered == MAX_UNANSWERED:
                reason = f"the environment left turn {len(spans)} unanswered for {waited_s} s"
                raise TurnError(reason) from error
            log.warning(
                "waits for the environment",
                sequence=sequence,
                turn=len(spans),
                waited_s=waited_s,
                reason=str(error),
            )
        except BusError as error:
            raise TurnError(f"the environment failed turn {len(spans)}: {error}") from error
        else:
            assert isinstance(turn, Turn)
            return None if turn.observation is None else turn.observation.tolist()


def next_turn(start: SequenceStart, generated: Generated, observation: list[int]) -> SequenceStart:
    """`start`, with all that came behind its prompt, the environment's answer last."""
    num = len(observation)
    return msgspec.structs.replace(
        start,
        tokens=(*generated.tokens, *observation),
        logprobs=(*generated.logprobs, *[0.0] * num),
        versions=(*generated.versions, *[-1] * num),
    )


class ToolWait(Wait):
    """The time in which a worker has nothing to generate and a sequence that waits for its environment:
    what waits while others generate costs nothing."""

    def __init__(self, substages: SubStages) -> None:
        super().__init__("tool_wait", substages)
        self._idle = True
        self._waiting = False

    def engine_is(self, *, idle: bool) -> None:
        """The engine has nothing to generate, or something again."""
        self._idle = idle
        self.runs(self._idle and self._waiting)

    def sequences_are(self, *, waiting: bool) -> None:
        """Some sequence waits for its environment, or none any more."""
        self._waiting = waiting
        self.runs(self._idle and self._waiting)


class _Waiting(NamedTuple):
    holding: Holding
    generated: Generated
    """With the reason why its turn ended."""
    asking: asyncio.Task[None]


class Turns:
    """The sequences of one worker that wait for their environment."""

    def __init__(
        self,
        context: Context,
        turns: TaskTurns,
        *,
        thread: EngineThread,
        tool_wait: ToolWait,
        end: Callable[[Holding, Generated], None],
        fail: Callable[[Holding, str], None],
    ) -> None:
        """`end` is told of a sequence whose episode is over, `fail` why one can't go on."""
        self._context = context
        self._turns = turns
        self._thread = thread
        self._tool_wait = tool_wait
        self._end = end
        self._fail = fail
        self._waiting: dict[str, _Waiting] = {}
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.standing = asyncio.Lock()
        """While it is held no sequence goes on: who holds it finds each one here, in the engine or
        ended, and not on its way."""

    def has_another(self, generated: Generated) -> bool:
        """Whether the environment is to be asked after a turn; it may say that there is none."""
        return len(turn_spans(generated.versions)) < self._turns.num_turns

    def begin(self, holding: Holding, generated: Generated) -> None:
        """Have a sequence wait, whose turn has ended."""
        asking = asyncio.create_task(self._ask(holding, generated))
        asking.add_done_callback(self._asked)
        self._waiting[holding.sequence] = _Waiting(holding, generated, asking)
        self._tool_wait.sequences_are(waiting=True)

    def snapshot(self, sequences: Iterable[str]) -> list[Generated]:
        """How far those of them are that wait."""
        found = (self._waiting.get(sequence) for sequence in sequences)
        return [one.generated for one in found if one is not None]

    def take(self, sequences: Iterable[str]) -> list[Generated]:
        """Have those of them that wait do so no longer; how far they are."""
        gone = [one for name in sequences if (one := self._waiting.pop(name, None)) is not None]
        for one in gone:
            one.asking.cancel()
        self._tool_wait.sequences_are(waiting=bool(self._waiting))
        return [one.generated for one in gone]

    async def watch(self) -> None:
        """Raises a fault of this program's own; never returns otherwise."""
        await asyncio.shield(self._fault)

    def close(self) -> None:
        """Ask no more."""
        self.take(list(self._waiting))

    async def _ask(self, holding: Holding, generated: Generated) -> None:
        observation, failure = None, None
        try:
            with about(sequence=holding.sequence):
                observation = await ask(
                    self._context,
                    holding.sequence,
                    problem=holding.problem,
                    generated=generated,
                    delay_s=self._turns.delay_s,
                )
        except TurnError as error:
            failure = str(error)
        async with self.standing:
            del self._waiting[holding.sequence]
            self._tool_wait.sequences_are(waiting=bool(self._waiting))
            if failure is not None:
                self._fail(holding, failure)
                return
            if observation is None:
                self._end(holding, generated)
                return
            start = next_turn(holding.start, generated, observation)
            adding = self._thread.submit(lambda engine: add_what_fits(engine, [start]))
        (refusal,) = await adding
        if refusal is not None:
            self._fail(holding, refusal)

    def _asked(self, asking: asyncio.Task[None]) -> None:
        if not asking.cancelled() and (fault := asking.exception()) and not self._fault.done():
            self._fault.set_exception(fault)
