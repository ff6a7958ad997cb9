"""Trace context is a function of ids, and is carried over from what is handled."""

from __future__ import annotations

import re

from jigsawrl.tracing import HEADER, NUM_REMEMBERED, Traces, current_trace_id, trace_id_in


def trace_of(headers: dict[str, str]) -> str:
    trace_id = trace_id_in(headers[HEADER])
    assert trace_id is not None
    return trace_id


def test_the_same_message_has_the_same_header_in_every_process() -> None:
    header = Traces().headers("7.0", cause="tick:3")
    assert header == Traces().headers("7.0", cause="tick:3")
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", header[HEADER])


def test_all_commands_of_one_decision_share_a_trace_and_each_is_a_span() -> None:
    first, second = (Traces().headers(f"7.{i}", cause="tick:3") for i in range(2))
    assert trace_of(first) == trace_of(second)
    assert first != second
    assert trace_of(Traces().headers("8.0", cause="tick:4")) != trace_of(first)


def test_what_a_handler_sends_belongs_to_the_trace_of_what_it_handles() -> None:
    command = Traces().headers("7.0", cause="tick:3")
    traces = Traces()
    with traces.handling("7.0", command):
        assert current_trace_id() == trace_of(command)
        inside = traces.headers("record:1")
    assert current_trace_id() is None
    later = traces.headers("shares_applied:1", cause="7.0")
    assert trace_of(inside) == trace_of(later) == trace_of(command)
    assert trace_of(traces.headers("heartbeat:1")) != trace_of(command)


def test_a_message_that_came_without_a_header_has_the_trace_it_would_have_been_given() -> None:
    traces = Traces()
    with traces.handling("7.0", None, cause="tick:3"):
        inside = traces.headers("record:1")
    assert trace_of(inside) == trace_of(Traces().headers("7.0", cause="tick:3"))


def test_headers_that_the_standard_calls_invalid_are_none() -> None:
    zeros = "0" * 32
    for text in (None, "", "x", f"00-{zeros}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01"):
        assert trace_id_in(text) is None


def test_what_was_handled_long_ago_is_forgotten() -> None:
    traces = Traces()
    command = Traces().headers("7.0", cause="tick:3")
    for number in range(NUM_REMEMBERED + 1):
        with traces.handling(f"7.{number}", command):
            pass
    assert trace_of(traces.headers("e", cause="7.1")) == trace_of(command)
    assert trace_of(traces.headers("e", cause="7.0")) != trace_of(command)
