"""The one thread in which an engine runs: torch never runs on the event loop. Calls from the event
loop are carried out between two steps, that is at a token boundary."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from services.rollout.engine.base import Engine, Generated, SequenceStart, Work

T = TypeVar("T")

Call = Callable[[Engine], None]


class EngineThread:
    """Runs steps while there is something to generate, and sleeps otherwise."""

    def __init__(
        self,
        engine: Engine,
        *,
        on_step: Callable[[list[Generated], list[Work]], None],
        on_idle: Callable[[bool], None] = lambda idle: None,
    ) -> None:
        """On the event loop `on_step` is called after each step, and `on_idle` whenever the thread
        begins to have nothing to generate (true, as at the start) or has something again (false)."""
        self._engine = engine
        self._on_step = on_step
        self._on_idle = on_idle
        self._idle = True
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine at the next token boundary; its result."""
        return await self.submit(function)

    def submit(self, function: Callable[[Engine], T]) -> asyncio.Future[T]:
        """The same, in its place among the calls before it returns."""
        done: asyncio.Future[T] = self._loop.create_future()

        def carry_out(engine: Engine) -> None:
            try:
                result = function(engine)
            except Exception as error:  # handed to the caller, who knows what to do with it
                self._loop.call_soon_threadsafe(_set_exception, done, error)
            else:
                self._loop.call_soon_threadsafe(_set_result, done, result)

        self._calls.put(carry_out)
        return done

    async def watch(self) -> None:
        """Raises what ended the thread; never returns otherwise."""
        await asyncio.shield(self._failure)

    async def close(self) -> None:
        """Stop after the step that runs now."""
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join, 3.0)

    def _run(self) -> None:
        try:
            while self._carry_out_calls():
                step = self._engine.step()
                if step.finished or step.work:
                    self._loop.call_soon_threadsafe(self._on_step, step.finished, step.work)
        except BaseException as error:
            self._loop.call_soon_threadsafe(_set_exception, self._failure, error)

    def _carry_out_calls(self) -> bool:
        """All queued calls; waits for one where there is nothing to generate. False = stop."""
        while True:
            idle = self._engine.version is None or not (
                self._engine.num_running or self._engine.num_waiting
            )
            if idle != self._idle:
                self._idle = idle
                self._loop.call_soon_threadsafe(self._on_idle, idle)
            try:
                call = self._calls.get(block=idle)
            except queue.Empty:
                return True
            if call is None:
                return False
            call(self._engine)


def add_what_fits(engine: Engine, starts: list[SequenceStart]) -> list[str | None]:
    """A call that adds what the engine can generate; why not, for each of the others."""
    refusals = [engine.check(start) for start in starts]
    fits = [s for s, refusal in zip(starts, refusals, strict=True) if refusal is None]
    engine.add(fits)
    return refusals


def _set_result(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
