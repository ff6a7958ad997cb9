"""Calls a service's handler so that its failure is a value.

Used by `commands` and `requests`. Here stands the one ``except Exception`` of the bus: whatever a
handler raises, the message is counted and repeated or refused, and the service lives on.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

log = logging.getLogger("jigsawrl.bus")

T = TypeVar("T")


async def outcome(handler: Callable[[Any], Awaitable[T]], message: Any) -> T | Exception:
    """What the handler returns or raises; a bug's traceback goes to the log."""
    try:
        return await handler(message)
    except Exception as error:
        if not isinstance(error, ValueError):
            log.exception("handler failed on %s", message.id)
        return error
