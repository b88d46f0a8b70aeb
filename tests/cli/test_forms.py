"""The JSON that commands print has the fields that docs/cli.md promises."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def promised(form: str) -> set[str]:
    """Return the fields of a form, as the page lists them."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| *{form}* "))
    without_notes = re.sub(r"\([^)]*\)", "", row.split("|")[2])
    return set(re.findall(r"`(\w+)`", without_notes))


@pytest.fixture
def said(perdure: Callable[..., Any]) -> Callable[..., Any]:
    perdure("init")
    perdure("send", "--new", "s", "what is 2 + 3?", "--agent", "assistant.md", "--tools", "tools.py")
    return perdure


def test_a_session(said: Callable[..., Any]) -> None:
    listed = said("ls", "--json").json
    assert set(listed) == promised("session") | promised("listed")
    assert set(listed["usage"]) == promised("usage")
    whole = set(said("show", "s", "--json").json)
    assert whole - promised("session") == {
        "model",
        "system_prompt",
        "task",
        "metadata",
        "pending_calls",
        "messages",
    }


def test_a_message(said: Callable[..., Any]) -> None:
    for message in said("show", "s", "--json").json["messages"]:
        assert {"id", "role", "parts"} <= set(message) <= promised("message")


def test_a_reply(said: Callable[..., Any]) -> None:
    reply = said("send", "s", "hello", "--tools", "tools.py", "--json").json
    assert set(reply) == promised("reply")
    assert set(reply["usage"]) == promised("usage")


def test_a_node(said: Callable[..., Any]) -> None:
    root = said("tree", "s", "--json").json
    assert set(root) == set(root["children"][0]) == promised("node")


def test_an_event(said: Callable[..., Any]) -> None:
    assert all({"type", "cursor"} <= set(event) for event in said("events", "s", "--json").json_lines)


@pytest.mark.parametrize("command", ["stats", "fsck", "doctor", "recover", "diff s s", "search what"])
def test_the_rest(said: Callable[..., Any], command: str) -> None:
    """Every field is in the command's row."""
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{command.split()[0]}` "))
    assert set(said(*command.split(), "--json").json) <= set(re.findall(r"`(\w+)`", row.split("|", 2)[2]))
