"""`--redact`, `--redactor` and PERDURE_REDACT: secrets that are typed are not stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CANARY = "sk-canary0123456789abcdefXYZ"


def test_secrets_are_replaced(perdure: Callable[..., Any], home: Path) -> None:
    """`--redact` uses the default set, `--redactor` adds one; what was replaced is counted."""
    perdure("send", "--new", "s", f"use {CANARY}, mail a@b.co", "--redact")
    said = perdure("show", "s").out
    assert "use [redacted:api-key], mail a@b.co" in said
    perdure("send", "s", "mail a@b.co", "--redactor", "email")
    assert "mail [redacted:email]" in perdure("show", "s").out
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


def test_an_unknown_redactor_is_refused(perdure: Callable[..., Any]) -> None:
    """The error names those that there are."""
    assert "There are: default, private-key" in perdure("send", "--new", "s", "x", "--redactor", "nothing", code=9).err
