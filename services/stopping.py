"""How a service process ends when it is told to: in order, but never later than its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
from collections.abc import Coroutine

STOP_DEADLINE_S = 3.8
"""From the signal to the end of the process. Nested in the 4 s after which the node kills a tenant, so
that the stacks of one that hangs get into its log; whoever stops a run is promised 5 s."""


async def until_told_to_stop(
    life: Coroutine[None, None, None], *, deadline_s: float = STOP_DEADLINE_S
) -> None:
    """Run `life` to its end, or cancel it at SIGTERM or SIGINT; raises what it raises.

    Whatever still hangs at the deadline (a thread in native code, a library that swallowed the
    cancellation) is written to standard error with the stacks of all threads, and the process exits
    with status 1. The deadline holds through everything that follows, the interpreter's end included.
    """
    living = asyncio.ensure_future(life)

    def stop() -> None:
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        living.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    with contextlib.suppress(asyncio.CancelledError):
        await living
