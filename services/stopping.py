"""How a service process ends when it is told to: in order, but never later than its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Callable, Coroutine, Iterator

import structlog
import uvloop

from jigsawrl.bus.base import BusError

log = structlog.get_logger()

STOP_DEADLINE_S = 3.8
"""From the signal to the end of the process. Nested in the 4 s after which the node kills a tenant, so
that the stacks of one that hangs get into its log; whoever stops a run is promised 5 s."""


def run_program(life: Coroutine[None, None, int]) -> int:
    """The exit status of a service: that of `life`, or 1 after one line for people where the bus can't
    be reached or can't go on."""
    status = 1
    try:
        status = uvloop.run(life)
    except* BusError as errors:
        log.error("can't go on", error="; ".join(map(str, _leaves(errors))))
    return status


def _leaves(group: BaseExceptionGroup[BusError]) -> Iterator[BusError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def until_told_to_stop(
    life: Coroutine[None, None, None],
    *,
    deadline_s: float = STOP_DEADLINE_S,
    take_leave: Callable[[], Coroutine[None, None, None]] | None = None,
) -> None:
    """Run `life` to its end, or cancel it at SIGTERM or SIGINT; raises what it raises. It goes on until
    `take_leave` has returned, if there is one, or until a second signal.

    Whatever still hangs at the deadline (a thread in native code, a library that swallowed the
    cancellation) is written to standard error with the stacks of all threads, and the process exits
    with status 1. The deadline holds through everything that follows, the interpreter's end included.
    """
    living = asyncio.ensure_future(life)
    farewells: list[asyncio.Task[None]] = []

    def stop() -> None:
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        living.cancel()

    def on_signal() -> None:
        if take_leave is None or farewells:
            stop()
        else:
            farewells.append(asyncio.create_task(take_leave()))
            farewells[0].add_done_callback(lambda _: None if living.done() else stop())

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await living
    finally:
        for farewell in farewells:
            farewell.cancel()
