"""Traces and metrics of runs, by OpenTelemetry. Nothing here is imported unless telemetry is asked for."""
