"""W3C trace context, made of ids that are there: no clock and no chance, so that a repeated message
carries the same header and a replay changes nothing.

The bus puts a ``traceparent`` on every message it sends, and says here what it hands to a handler; logs
name the trace. A message of nobody's doing begins a trace of its own. What a handler sends belongs to
the trace of what it handles, and so does, later, what names that as its cause. A command's trace is
made of its cause, the event that the scheduler decided on: one trace is one decision and all that
workers did about it, and ends there. Carried on through the scheduler it would never end, since every
decision follows from earlier ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

HEADER = "traceparent"

NUM_REMEMBERED = 4096
"""Handled messages whose trace is known to what they lead to later."""

_PATTERN = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")

_handled: ContextVar[str | None] = ContextVar("jigsawrl_trace", default=None)
"""Trace id of the message that this task handles."""


def trace_id_of(*parts: object) -> str:
    """32 hexadecimal digits."""
    return _digest("trace", parts, num_bytes=16)


def span_id_of(*parts: object) -> str:
    """16 hexadecimal digits."""
    return _digest("span", parts, num_bytes=8)


def _digest(kind: str, parts: tuple[object, ...], *, num_bytes: int) -> str:
    text = "\0".join((kind, *map(str, parts)))
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def trace_id_in(header: str | None) -> str | None:
    """Of a received ``traceparent``; None where it is none, or one that the standard calls invalid."""
    match = _PATTERN.fullmatch(header or "")
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return match[1]


def current_trace_id() -> str | None:
    """Of the message that is being handled here."""
    return _handled.get()


class Traces:
    """What one connection knows of traces."""

    def __init__(self) -> None:
        self._of: OrderedDict[str, str] = OrderedDict()
        """Id of a handled message -> its trace id."""

    def headers(self, id: str, *, cause: str = "") -> dict[str, str]:
        """Of a message that is about to be sent."""
        trace_id = _handled.get() or self._of.get(cause) or trace_id_of(cause or id)
        return {HEADER: f"00-{trace_id}-{span_id_of(id)}-01"}

    @contextlib.contextmanager
    def handling(
        self, id: str, headers: Mapping[str, str] | None, *, cause: str = ""
    ) -> Iterator[None]:
        """Around the handler of a message that came with these headers."""
        trace_id = trace_id_in((headers or {}).get(HEADER)) or trace_id_of(cause or id)
        self._of[id] = trace_id
        if len(self._of) > NUM_REMEMBERED:
            self._of.popitem(last=False)
        token = _handled.set(trace_id)
        try:
            yield
        finally:
            _handled.reset(token)
