"""What the leader folds comes out as OpenTelemetry spans, at a real collector's address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.events import Event, SubStagesEnded, VersionPublished
from jigsawrl.contract.message import Ref, Worker
from jigsawrl.contract.parts import SubStage
from jigsawrl.core.state import State, new_pipeline
from services.scheduler.spans import SpanWatch
from tests.services.span_collector import collecting_spans
from tests.unit.core.world import spec

WORKER = Worker(id="p.trainer0", boot="b")


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Spans that were exported, as (service, span)."""
    with collecting_spans() as (endpoint, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        yield received


def state() -> State:
    made = State()
    made.pipelines["p"] = new_pipeline(spec(), b"", gang_epoch=0, submissions=["submitted:p:1"])
    return made


def ended(id: str, *, version: int) -> SubStagesEnded:
    span = SubStage(
        kind="forward_backward",
        version=version,
        started_s=100.5,
        ended_s=101.0,
        duration_s=0.4,
        num_iterations=3,
        num_tokens=12,
    )
    return SubStagesEnded(id=id, pipeline="p", worker=WORKER, spans=(span, span))


def published(version: int) -> VersionPublished:
    return VersionPublished(
        id=f"v{version}",
        pipeline="p",
        worker=WORKER,
        gang_epoch=1,
        incarnation=0,
        version=version,
        manifest=Ref("s", 1),
        num_bytes=1,
        num_trained_tokens=12,
        metrics={},
    )


def export(*events: Event, ignored: bool = False) -> None:
    watch = SpanWatch()
    watch.leads(state(), None, None)  # type: ignore[arg-type]
    for sequence, event in enumerate(events, 1):
        stored = StoredEvent(
            sequence=sequence, timestamp_s=100.0 + sequence, event=event, payload=b""
        )
        watch.folded(stored, (), taken_s=0.0, decided=False, ignored=ignored)
    watch.ended()
    watch.close()


def test_what_the_core_ignored_is_no_span(collector: list[Any]) -> None:
    export(published(4), ended("s1", version=4), published(5), ignored=True)
    assert not collector


def test_a_step_is_a_trace_with_its_sub_stages_below_it(collector: list[Any]) -> None:
    export(published(4), ended("s1", version=4), published(5))
    assert {service for service, _ in collector} == {"jigsawrl"}
    spans = [span for _, span in collector]
    (step,) = (span for span in spans if span.name == "step 5")
    parts = [span for span in spans if span.name == "forward_backward"]
    assert len(parts) == 2
    assert {part.trace_id for part in parts} == {step.trace_id}
    assert {part.parent_span_id for part in parts} == {step.span_id}
    assert len({span.span_id for span in spans}) == 3
    assert (step.start_time_unix_nano, step.end_time_unix_nano) == (101 * 10**9, 103 * 10**9)
    assert parts[0].end_time_unix_nano - parts[0].start_time_unix_nano == 5 * 10**8
    found = {a.key: a.value for a in parts[0].attributes}
    assert found["jigsaw.worker"].string_value == "p.trainer0"
    assert found["jigsaw.iterations"].int_value == 3


def test_a_successor_exports_under_the_same_ids(collector: list[Any]) -> None:
    for _ in range(2):
        export(ended("s1", version=4))
    ids = [(span.trace_id, span.span_id) for _, span in collector]
    assert len(ids) == 4
    assert len(set(ids)) == 2


def test_nothing_else_brings_the_exporter_in() -> None:
    code = (
        "import sys, services.scheduler.__main__ as program\n"
        "assert program._span_watch() is None\n"
        "print('opentelemetry' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
