"""Exports what workers did as OpenTelemetry spans: one trace per step of a pipeline, from the events
that the leader folds. The only importer of opentelemetry (the extra ``otel``).

The root span is the step, from one version to the next; below it lies a span for each `SubStage` that
workers told while they worked with that version. Ids are made of the submission's id, the incarnation
and the version, so that a successor's spans join the same traces. Where and how spans go is for
OpenTelemetry's own variables to say (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from jigsawrl import __version__
from jigsawrl.bus.base import StoredEvent
from jigsawrl.contract.commands import Command
from jigsawrl.contract.events import SubStagesEnded, VersionPublished
from jigsawrl.core.state import Pipeline, State
from jigsawrl.tracing import span_id_of, trace_id_of
from services.scheduler.journal import Journal
from services.scheduler.outgoing import Outgoing

SCOPE = InstrumentationScope("jigsawrl", __version__)

Attributes = dict[str, str | int | float]


class SpanWatch:
    """A `Watch` of one process's leader."""

    def __init__(self, exporter: SpanExporter | None = None) -> None:
        """Without an exporter spans go to where the environment says."""
        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "jigsawrl"}
        self._resource = Resource.create(named)
        self._processor = BatchSpanProcessor(exporter or OTLPSpanExporter())
        self._state: State | None = None
        self._published_s: dict[str, float] = {}
        """Per pipeline, when its newest version was."""

    def leads(self, state: State, journal: Journal, outgoing: Outgoing) -> None:
        """See `Watch`."""
        self._state = state

    def folded(
        self,
        stored: StoredEvent,
        commands: Sequence[Command],
        *,
        taken_s: float,
        decided: bool,
        ignored: bool,
    ) -> None:
        """Hand its spans to the thread that sends them."""
        event = stored.event
        if ignored:
            return
        if not isinstance(event, SubStagesEnded | VersionPublished) or self._state is None:
            return
        pipeline = self._state.pipelines.get(event.pipeline or "")
        if pipeline is None:
            return
        if isinstance(event, SubStagesEnded):
            self._add_substages(pipeline, event)
        else:
            self._add_step(pipeline, event, stored.timestamp_s)

    def ended(self) -> None:
        """See `Watch`."""
        self._state = None
        self._published_s.clear()

    def close(self) -> None:
        """Send the rest; blocks while that takes."""
        self._processor.shutdown()

    def _add_step(self, pipeline: Pipeline, event: VersionPublished, now_s: float) -> None:
        started_s = self._published_s.get(pipeline.name)
        self._published_s[pipeline.name] = now_s
        if started_s is None or event.version == 0:
            return
        version = event.version - 1
        self._end(
            f"step {event.version}",
            _context(pipeline, event.incarnation, version),
            parent=None,
            started_s=started_s,
            ended_s=now_s,
            attributes={
                "jigsaw.pipeline": pipeline.name,
                "jigsaw.version": version,
                "jigsaw.tokens": event.num_trained_tokens,
            },
        )

    def _add_substages(self, pipeline: Pipeline, event: SubStagesEnded) -> None:
        for number, span in enumerate(event.spans):
            parent = _context(pipeline, pipeline.incarnation, span.version)
            attributes: Attributes = {
                "jigsaw.pipeline": pipeline.name,
                "jigsaw.worker": event.worker.id,
                "jigsaw.version": span.version,
                "jigsaw.busy_s": span.duration_s,
                "jigsaw.iterations": span.num_iterations,
                "jigsaw.tokens": span.num_tokens,
            }
            self._end(
                span.kind,
                SpanContext(
                    parent.trace_id,
                    int(span_id_of(event.id, number), 16),
                    is_remote=False,
                    trace_flags=TraceFlags(TraceFlags.SAMPLED),
                ),
                parent=parent,
                started_s=span.started_s,
                ended_s=max(span.started_s, span.ended_s),
                attributes=attributes,
            )

    def _end(
        self,
        name: str,
        context: SpanContext,
        *,
        parent: SpanContext | None,
        started_s: float,
        ended_s: float,
        attributes: Attributes,
    ) -> None:
        span = ReadableSpan(
            name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            start_time=int(started_s * 1e9),
            end_time=int(ended_s * 1e9),
            instrumentation_scope=SCOPE,
        )
        self._processor.on_end(span)


def _context(pipeline: Pipeline, incarnation: int, version: int) -> SpanContext:
    """Of the step that begins with a version."""
    submission = pipeline.submissions[-1] if pipeline.submissions else pipeline.name
    step = (submission, incarnation, version)
    return SpanContext(
        int(trace_id_of(*step), 16),
        int(span_id_of(*step), 16),
        is_remote=False,
        trace_flags=TraceFlags(TraceFlags.SAMPLED),
    )
