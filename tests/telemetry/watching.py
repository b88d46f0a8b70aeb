"""The real SDK, with an exporter and a reader that keep everything."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from perdure import Telemetry


class Watching:
    """A `Telemetry` that keeps its spans and metrics for the test."""

    def __init__(self, *, content: bool = False) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self._exporter))
        self._reader = InMemoryMetricReader()
        self.meters = MeterProvider([self._reader])
        self.telemetry = Telemetry(content=content, tracer_provider=self.tracers, meter_provider=self.meters)
        self.tracer = self.tracers.get_tracer("a user's own")

    def spans(self, name: str | None = None) -> list[ReadableSpan]:
        """Return the spans that have ended, in order; or those of an operation, such as `chat`."""
        self.telemetry.flush()
        found = self._exporter.get_finished_spans()
        return [span for span in found if name is None or operation(span) == name]

    def the(self, name: str) -> ReadableSpan:
        """Return the only span of an operation."""
        (found,) = self.spans(name)
        return found

    def points(self, metric: str) -> list[Any]:
        """Return the collected points of a metric."""
        self.telemetry.flush()
        data = self._reader.get_metrics_data()
        return [
            point
            for resource in (data.resource_metrics if data is not None else ())
            for scope in resource.scope_metrics
            for found in scope.metrics
            if found.name == metric
            for point in found.data.data_points
        ]

    def text(self) -> str:
        """Return all that was exported, as text."""
        return "\n".join(span.to_json() for span in self.spans())


def operation(span: ReadableSpan) -> str:
    return str((span.attributes or {}).get("gen_ai.operation.name", span.name))


def told(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def trace_of(span: ReadableSpan) -> int:
    return int(span.get_span_context().trace_id)


def is_beneath(span: ReadableSpan, parent: ReadableSpan) -> bool:
    """Tell whether a span is a child of another."""
    above = span.parent
    here = parent.get_span_context()
    return above is not None and (above.trace_id, above.span_id) == (here.trace_id, here.span_id)


def links_of(span: ReadableSpan) -> dict[str, int]:
    """Return a span's links: the ids of spans, by the kind of the link."""
    return {str((link.attributes or {})["perdure.link"]): link.context.span_id for link in span.links}
