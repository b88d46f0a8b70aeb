"""Traces and metrics of runs, by OpenTelemetry. Nothing here is imported unless you ask for telemetry."""
