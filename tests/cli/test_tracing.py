"""Commands that are traced."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest


def test_a_run_is_traced_to_stderr(perdure: Callable[..., Any]) -> None:
    """Spans and metrics go to stderr, and contain no messages; only the answer goes to stdout."""
    shown = perdure("send", "--new", "s", "what is 19 * 21?", "--telemetry", "console")
    assert "399" in shown.out
    assert '"name": "invoke_agent assistant"' in shown.err
    assert '"name": "chat offline"' in shown.err
    assert '"gen_ai.conversation.id": "s"' in shown.err
    assert shown.err.count('"name": "gen_ai.client.token.usage"') == 1
    assert "19 * 21" not in shown.err


def test_content_is_traced_if_it_is_asked_for(perdure: Callable[..., Any]) -> None:
    """Spans contain messages with --telemetry-content, which needs --telemetry."""
    traced = perdure("send", "--new", "s", "what is 19 * 21?", "--telemetry", "console", "--telemetry-content")
    assert "19 * 21" in traced.err
    assert "--telemetry" in perdure("send", "s", "more", "--telemetry-content", code=2).err


def test_providers_of_the_process_are_used(perdure: Callable[..., Any]) -> None:
    """With `global` nothing is set up: the providers of `opentelemetry-instrument` are used, if there are any."""
    assert "399" in perdure("send", "--new", "s", "what is 19 * 21?", "--telemetry", "global").out


@pytest.mark.skipif(find_spec("opentelemetry.exporter") is not None, reason="the exporter is installed")
def test_a_missing_exporter_says_what_to_install(perdure: Callable[..., Any]) -> None:
    """Without the exporter to a collector, the error names its package, and nothing is sent."""
    shown = perdure("send", "--new", "s", "hello", "--telemetry", "otlp", code=9)
    assert "opentelemetry-exporter-otlp-proto-http" in shown.err
    assert perdure("ls").lines == []


def test_a_worker_passes_it_on() -> None:
    """A process in which a worker tries a run apart is traced as the worker is."""
    import click

    from perdure.cli.options import settings_of
    from perdure.cli.working import command_apart

    ctx = click.Context(click.Command("worker"))
    settings_of(ctx).telemetry, settings_of(ctx).telemetry_content = "otlp", True
    command, _ = command_apart(ctx, {"lease": 20.0, "tries": 3, "per_owner": None, "rate": None}, as_json=False)
    assert command[command.index("--telemetry") + 1] == "otlp"
    assert "--telemetry-content" in command
