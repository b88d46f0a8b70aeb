"""`--redact`, `--redactor` and PERDURE_REDACT: typed secrets are not stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from perdure.cli.options import settings_of
from perdure.cli.working import command_apart

CANARY = "sk-canary0123456789abcdefXYZ"


def test_secrets_are_replaced(perdure: Callable[..., Any], home: Path) -> None:
    """`--redact` uses the default set, `--redactor` adds one to it; replacements are counted."""
    perdure("send", "--new", "s", f"use {CANARY}, mail a@b.co", "--redact")
    said = perdure("show", "s").out
    assert "use [redacted:api-key], mail a@b.co" in said
    perdure("send", "s", f"mail a@b.co, not {CANARY}", "--redactor", "email")
    assert "mail [redacted:email], not [redacted:api-key]" in perdure("show", "s").out
    assert perdure("stats", "--json").json["redactions"]["api-key"] >= 1
    assert "redacted: api-key" in perdure("stats").err
    assert "redacted: api-key" in perdure("events", "s").out
    assert not any(CANARY.encode() in path.read_bytes() for path in home.rglob("*.db*"))


def test_the_environment_and_a_file_name_redactors(
    perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold for every command, also for those that run no agent."""
    monkeypatch.setenv("PERDURE_REDACT", "default, email")
    perdure("send", "--new", "s", "hello")
    perdure("rename", "s", f"about {CANARY} and a@b.co")
    assert perdure("show", "s", "--json").json["name"] == "about [redacted:api-key] and [redacted:email]"
    monkeypatch.delenv("PERDURE_REDACT")
    (home / "perdure.toml").write_text('redact = "default"')
    perdure("rename", "s", f"now {CANARY}")
    assert perdure("show", "s", "--json").json["name"] == "now [redacted:api-key]"


@pytest.mark.parametrize("option", [("--redactor", "phone"), ("--redact",)])
def test_an_option_takes_no_redactor_away(
    option: tuple[str, ...], perdure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's redactors work whichever option is added."""
    monkeypatch.setenv("PERDURE_REDACT", "email")
    perdure("send", "--new", "s", f"mail a@b.co from {CANARY} at +44 20 7946 0958", *option)
    said = perdure("show", "s").out
    assert "mail [redacted:email]" in said
    assert (CANARY in said) == ("--redact" not in option)
    assert ("[redacted:phone]" in said) == ("phone" in option)


@pytest.mark.parametrize("empty", ["", " ", ","])
def test_an_empty_list_of_redactors_is_refused(
    empty: str, perdure: Callable[..., Any], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would quietly store every secret. A typed option comes first."""
    monkeypatch.setenv("PERDURE_REDACT", empty)
    refused = perdure("send", "--new", "s", CANARY, code=2)
    assert "PERDURE_REDACT is empty" in refused.err
    perdure("send", "--new", "s", f"use {CANARY}", "--redact")
    monkeypatch.delenv("PERDURE_REDACT")
    assert "use [redacted:api-key]" in perdure("show", "s").out
    (home / "perdure.toml").write_text(f'redact = "{empty}"')
    assert "perdure.toml is empty" in perdure("show", "s", code=2).err


def test_a_worker_passes_it_on() -> None:
    """A process in which a worker tries a run apart stores no more than the worker."""
    ctx = click.Context(click.Command("worker"))
    settings_of(ctx).redact, settings_of(ctx).redactor = True, ("email",)
    command, _ = command_apart(ctx, {"lease": 20.0, "tries": 3, "per_owner": None, "rate": None}, as_json=False)
    assert "--redact" in command
    assert command[command.index("--redactor") + 1] == "email"


def test_an_unknown_redactor_is_refused(perdure: Callable[..., Any]) -> None:
    """The error names the known ones."""
    assert "There are: default, private-key" in perdure("send", "--new", "s", "x", "--redactor", "nothing", code=9).err
