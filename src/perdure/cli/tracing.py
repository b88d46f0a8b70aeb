"""The set-up of OpenTelemetry's SDK for a command, and the place where its traces are sent."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from perdure.errors import ConfigurationError
from perdure.telemetry.telemetry import Telemetry


def telemetry_to(where: str, *, content: bool = False) -> Telemetry:
    """Return telemetry that goes to stderr, to a collector, or to the providers that the process has set up."""
    if where == "global":  # `opentelemetry-instrument perdure …` has set the providers, and sends what is left
        return Telemetry(content=content)
    try:
        tracers, meters = _providers(where)
    except ImportError as error:
        packages = "opentelemetry-sdk" + (" opentelemetry-exporter-otlp-proto-http" if where == "otlp" else "")
        what = f"--telemetry {where} needs a package that is not here ({error})."
        raise ConfigurationError(what, f"pip install 'perdure[otel]' {packages}") from error
    return CommandTelemetry(content=content, tracer_provider=tracers, meter_provider=meters)


class CommandTelemetry(Telemetry):
    """Telemetry of a command. Spans that are left when its connection closes are sent before the command ends."""

    def __init__(self, *, tracer_provider: Any, meter_provider: Any, content: bool = False) -> None:
        super().__init__(content=content, tracer_provider=tracer_provider, meter_provider=meter_provider)
        self._providers = tracer_provider, meter_provider

    def unwatch(self, watched: Any) -> None:
        super().unwatch(watched)
        for provider in self._providers:
            try:
                provider.shutdown()
            except Exception as error:  # around a subscriber: an exporter
                self.report(error)


def _providers(where: str) -> tuple[Any, Any]:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    spans, metrics = _exporters(where)
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", "perdure")})
    tracers = TracerProvider(resource=resource)
    tracers.add_span_processor(BatchSpanProcessor(spans))
    return tracers, MeterProvider([PeriodicExportingMetricReader(metrics)], resource=resource)


def _exporters(where: str) -> tuple[Any, Any]:
    if where == "console":
        from opentelemetry.sdk.metrics.export import ConsoleMetricExporter
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter

        return ConsoleSpanExporter(out=sys.stderr), ConsoleMetricExporter(out=sys.stderr)
    # The exporters read OTEL_EXPORTER_OTLP_ENDPOINT, OTEL_EXPORTER_OTLP_HEADERS and the like by themselves.
    spans = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    metrics = import_module("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    return spans.OTLPSpanExporter(), metrics.OTLPMetricExporter()
