"""How many servers keep each stream: three in a cluster, one where there is one server.

Used by `streams` and `lease`. Nothing says beforehand which it is: JetStream tells nobody but the
operator how large its cluster is, so three are asked for, and a server without a cluster refuses that.
A cluster of which too few servers are up refuses otherwise, and is waited for: a stream must not be
made on one server because two restart.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.js.errors
from nats.js import JetStreamContext

NUM_REPLICAS = 3
"""One server may die, and nothing is lost and nothing waits for longer than an election."""

NOT_CLUSTERED = 10074
"""JetStream error code: more than one replica on a server without a cluster."""

NO_PEERS = 10005
"""JetStream error code: fewer servers of the cluster are up than replicas are asked for."""

T = TypeVar("T")


async def replicated(
    js: JetStreamContext, make: Callable[[JetStreamContext, int], Awaitable[T]]
) -> T:
    """Make a stream with as many replicas as there can be; a TimeoutError where servers are missing."""
    try:
        return await make(js, NUM_REPLICAS)
    except nats.js.errors.APIError as error:
        if error.err_code == NO_PEERS:
            raise TimeoutError(
                f"too few servers of the cluster are up to keep it {NUM_REPLICAS} times"
            ) from error
        if error.err_code != NOT_CLUSTERED:
            raise
    return await make(js, 1)
