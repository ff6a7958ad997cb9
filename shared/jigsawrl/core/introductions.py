"""Who may work with this leader: nodes and workers whose schema is next to its own.

What older or newer ones say could be misunderstood (`contract.message`), so a node that is further away
gets no work, by name, and a worker fails its pipeline, which is where a person looks. They are held
against the schema of the leader's own election, as it stands in the stream: a replay by a later version
of the code decides as this one did.

Also how far the wall clock of each node is from the server's. Nothing is decided by it: leases are
counted in stream time, and the stream is stamped by the server.
"""

from __future__ import annotations

import math

from jigsawrl.contract.events import Heartbeat, LeaderElected, NodeStarted, NodeStopped
from jigsawrl.contract.message import MAX_SCHEMAS_APART, Worker
from jigsawrl.core import nodes
from jigsawrl.core.introduction import Introduction
from jigsawrl.core.state import State


def refusal(state: State, schema: int, who: str) -> str | None:
    """Why the leader can't work with `who`; None where it can."""
    if abs(schema - state.schema) <= MAX_SCHEMAS_APART:
        return None
    late = who if schema < state.schema else "the scheduler"
    return (
        f"{who} speaks schema {schema} and the scheduler {state.schema}, more than"
        f" {MAX_SCHEMAS_APART} apart: upgrade {late}, one schema at a time"
    )


def led_by(state: State, event: LeaderElected) -> None:
    """A leader of another schema holds all nodes against its own; those that it refuses have left."""
    if event.schema == state.schema:
        return
    state.schema = event.schema
    for name, known in state.introductions.items():
        why = refusal(state, known.schema, name)
        if why is None and known.refused is not None:
            why = f"{name} was refused by an earlier scheduler: start it again"
        elif why is not None and known.refused is None:
            node = Worker(id=name, boot=known.boot)
            nodes.stopped(state, NodeStopped(id=event.id, node=node, reason=why))
        known.refused = why


def started(state: State, event: NodeStarted) -> None:
    """A node's boot is up: one that may work here joins the others."""
    name, boot = event.node.id, event.node.boot
    known = state.introductions.get(name)
    refused = refusal(state, event.schema, name)
    if refused is None:
        nodes.started(state, event)
        node = state.nodes.get(name)
        is_repeat = known is not None and known.boot == boot
        if is_repeat or node is None or node.boot != boot:
            return
    known = Introduction(
        boot=boot, schema=event.schema, code_version=event.code_version, refused=refused
    )
    state.introductions[name] = known
    _look_at_clock(state, known, event.clock_s)


def stopped(state: State, event: NodeStopped) -> None:
    """A node leaves on purpose."""
    known = state.introductions.get(event.node.id)
    if known is not None and known.boot == event.node.boot:
        known.left = True
    nodes.stopped(state, event)


def heard(state: State, event: Heartbeat) -> None:
    """A node lives."""
    known = state.introductions.get(event.node.id)
    if known is not None and known.boot == event.node.boot:
        _look_at_clock(state, known, event.clock_s)
        if known.refused is not None:
            return
    nodes.heard(state, event)


def _look_at_clock(state: State, known: Introduction, clock_s: float | None) -> None:
    stored_s = state.clock.last_timestamp_s
    if clock_s is not None and stored_s is not None and math.isfinite(clock_s):
        skew_s = clock_s - stored_s
        before_s = known.last_skew_s
        known.clock_skew_s = skew_s if before_s is None else max(before_s, skew_s)
        known.last_skew_s = skew_s
