"""MCP servers that are named on the command line."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from perdure.cli import hints
from perdure.cli.options import Settings

OLD = Path(__file__).parents[1] / "loop" / "mcp" / "old_served.py"
SERVER = shlex.join([sys.executable, str(OLD)])


def test_the_tools_of_servers_are_called(perdure: Callable[..., Any]) -> None:
    """`--mcp` starts a command, and may be given several times; a file of tools may name servers too."""
    Path("tools.py").write_text(f"import perdure\nserver = perdure.mcp({SERVER!r}, prefix='b_')\n")
    options = ("--mcp", SERVER, "--tools", "tools.py", "--model", "offline")
    assert "first was called" in perdure("send", "--new", "s", "call first {}", *options).out
    assert "first was called" in perdure("send", "s", "call b_first {}", *options).out
    taken = perdure("send", "s", "call first {}", "--mcp", SERVER, "--mcp", SERVER, code=9)
    assert "both named 'first'" in taken.err
    assert "prefix=" in taken.err


@pytest.mark.parametrize(
    ("server", "code", "said"),
    [("no-such-command", 9, "cannot be reached"), ("a 'b", 2, "cannot be split"), ("", 2, "expected the command")],
)
def test_a_server_that_cannot_be_started_is_told(
    perdure: Callable[..., Any], server: str, code: int, said: str
) -> None:
    """No message is sent in the session."""
    perdure("send", "--new", "s", "hello")
    assert said in perdure("send", "s", "hello", "--mcp", server, code=code).err
    assert len(perdure("show", "s", "--json").json["messages"]) == 2


def test_a_config_file_cannot_name_servers(perdure: Callable[..., Any], home: Path) -> None:
    """A file that happens to be in a directory starts nothing."""
    (home / "perdure.toml").write_text('mcp = "rm -rf ."')
    assert "--mcp" in perdure("ls", code=9).err


def test_hints_repeat_the_servers() -> None:
    """A hint works as it is; a password or key in an address is left out of it."""
    settings = Settings()
    settings.mcp = ("uvx some-server --x", "https://ada:pw@example.com/mcp?key=abc")
    with click.Context(click.Command("perdure"), obj=settings):
        told = hints.command("recover", "s", tools=True)
    assert told.endswith("recover s --mcp 'uvx some-server --x' --mcp https://example.com/mcp")
