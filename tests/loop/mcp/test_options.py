"""A user's options for an MCP server, and the tools made from its list. No server is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.loop.mcp.scene import listed, tools_of

import perdure
from perdure import ConfigurationError, InvalidData, ToolError
from perdure.protocols import Toolset


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("uvx mcp-server-time --local-timezone=Europe/Oslo", "mcp-server-time"),
        ("npx -y @modelcontextprotocol/server-filesystem /home/ada", "server-filesystem"),
        (["python", Path("/opt/my server/weather.py")], "python"),
        (["python", "/opt/weather.py"], "weather"),
        ("http://ada:pw@example.com:8080/mcp?key=abc", "example.com:8080"),
        ("HTTPS://example.com/mcp", "example.com"),
    ],
)
def test_a_server_has_a_name_without_secrets(what: Any, name: str) -> None:
    """A server without a given name gets the most telling part of its command or address."""
    server = perdure.mcp(what)
    assert isinstance(server, Toolset)
    assert server.name == name
    assert repr(server) == f"<mcp {name}>"
    assert perdure.mcp(what, name="own").name == "own"


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("", {}),
        ("   ", {}),
        ("uvx 'x", {}),
        ([], {}),
        ([""], {}),
        (["uvx", 3], {}),
        (3, {}),
        (None, {}),
        (b"uvx x", {}),
        ("ftp://example.com", {}),
        ("uvx x", {"headers": {"A": "b"}}),
        ("uvx x", {"token_env": "TOKEN"}),
        ("http://x", {"env": {"A": "b"}}),
        ("http://x", {"cwd": "/"}),
        ("http://x", {"token_env": ""}),
        ("http://x", {"headers": {"A": 3}}),
        ("http://x", {"headers": "A: b"}),
        ("uvx x", {"env": {"A": 3}}),
        ("uvx x", {"name": " "}),
        ("uvx x", {"name": 3}),
        ("uvx x", {"only": "add"}),
        ("uvx x", {"only": [3]}),
        ("uvx x", {"leave_out": 3}),
        ("uvx x", {"prefix": "a b"}),
        ("uvx x", {"prefix": 3}),
        ("uvx x", {"needs_approval": "always"}),
        ("uvx x", {"needs_approval": 3}),
        ("uvx x", {"on_unknown": "retry"}),
        ("uvx x", {"on_unknown": {"add": "retry"}}),
        ("uvx x", {"timeout": 0}),
        ("uvx x", {"timeout": "long"}),
        ("uvx x", {"timeout": float("inf")}),
    ],
)
def test_bad_options_are_refused_at_once(what: Any, options: dict[str, Any]) -> None:
    """A mistake raises where it is made, not when the server is started."""
    with pytest.raises((ConfigurationError, InvalidData)):
        perdure.mcp(what, **options)


def test_hints_say_what_may_be_called_again() -> None:
    """A read-only or idempotent tool is called again after a crash; for any other the model gets an error."""
    tools = tools_of(
        perdure.mcp("x"),
        listed("look", readOnlyHint=True),
        listed("put", idempotentHint=True),
        listed("pay"),
        {"name": "bare", "inputSchema": {}},
    )
    assert {name: (tool.idempotent, tool.on_unknown) for name, tool in tools.items()} == {
        "look": (True, "rerun"),
        "put": (True, "rerun"),
        "pay": (False, "error"),
        "bare": (False, "error"),
    }


def test_what_a_user_says_of_unknown_outcomes_goes_before_hints() -> None:
    """They do so for the whole server, or tool by tool."""
    look, pay = listed("look", readOnlyHint=True), listed("pay")
    assert {tool.on_unknown for tool in tools_of(perdure.mcp("x", on_unknown="ask"), look, pay).values()} == {"ask"}
    by_name = tools_of(perdure.mcp("x", on_unknown={"pay": "ask"}), look, pay)
    assert {name: tool.on_unknown for name, tool in by_name.items()} == {"look": "rerun", "pay": "ask"}


@pytest.mark.parametrize(
    ("needs_approval", "waiting"),
    [
        (None, set()),
        (False, set()),
        (True, {"look", "pay", "say"}),
        ("destructive", {"pay"}),
        ({"say"}, {"say"}),
        (["look", "say"], {"look", "say"}),
        (lambda name, arguments: name == "pay" and arguments["amount"] > 3, {"pay"}),
        (lambda name, arguments: name == "pay" and arguments["amount"] > 5, set()),
    ],
)
def test_who_waits_for_a_person(needs_approval: Any, waiting: set[str]) -> None:
    """All tools wait, or the destructive ones, the named ones, or those a function selects."""
    server = perdure.mcp("x", needs_approval=needs_approval, prefix="p_")
    tools = tools_of(server, listed("look", readOnlyHint=True), listed("pay"), listed("say", destructiveHint=False))
    assert {tool.name_there for tool in tools.values() if tool.needs_approval({"amount": 5})} == waiting


def test_some_tools_are_taken_and_named() -> None:
    """`only`, `leave_out` and `prefix` work; characters that models do not take become _."""
    a, b, c = listed("files.read"), listed("write"), listed("drop")
    assert set(tools_of(perdure.mcp("x"), a, b, c)) == {"files_read", "write", "drop"}
    assert set(tools_of(perdure.mcp("x", only=["files.read", "drop"], prefix="fs_"), a, b, c)) == {
        "fs_files_read",
        "fs_drop",
    }
    assert set(tools_of(perdure.mcp("x", leave_out={"drop"}), a, b, c)) == {"files_read", "write"}


@pytest.mark.parametrize("option", ["only", "leave_out", "needs_approval"])
def test_a_name_that_the_server_has_not_is_refused(option: str) -> None:
    """A tool to be left out, or to wait for a person, must not slip in by a typing error."""
    with pytest.raises(ConfigurationError, match=f"no tool named 'drpo'. It has: drop, write. Correct {option}="):
        tools_of(perdure.mcp("x", **{option: ["drpo"]}), listed("write"), listed("drop"))
    with pytest.raises(ConfigurationError, match="Correct on_unknown="):
        tools_of(perdure.mcp("x", on_unknown={"drpo": "ask"}), listed("write"), listed("drop"))


@pytest.mark.parametrize("name", ["x" * 65, "7up", "", "…" * 70])
def test_a_name_that_no_model_takes_is_refused(name: str) -> None:
    """The error says how to do without the tool."""
    with pytest.raises(ConfigurationError, match="leave_out="):
        tools_of(perdure.mcp("x"), listed(name))
    assert tools_of(perdure.mcp("x", leave_out=[name]), listed(name)) == {}


@pytest.mark.parametrize(
    ("schema", "arguments", "problem"),
    [
        ({"type": "object", "required": ["a"]}, {}, "'a' is a required property at \\$"),
        ({"properties": {"a": {"type": "integer"}}}, {"a": "1"}, "at \\$.a"),
        ({"properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"minimum": 3}}}, {"a": 1}, "at \\$.a"),
        ({"properties": {"a": {"$ref": "http://example.com/schema"}}}, {"a": 1}, None),
        ({"type": "objekt"}, {"a": 1}, None),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "required": ["a"]}, {}, "required"),
    ],
)
def test_arguments_are_checked_against_the_schema(schema: Any, arguments: Any, problem: str | None) -> None:
    """A schema that cannot be applied here, or names an address, is left to the server; nothing is fetched."""
    (tool,) = tools_of(perdure.mcp("x"), {"name": "t", "inputSchema": schema}).values()
    if problem is None:
        assert tool.check(arguments) == arguments
    else:
        with pytest.raises(ToolError, match=problem):
            tool.check(arguments)


def test_secrets_are_taken_out_of_what_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors are stored and shown to models: they have no header, token, variable or address with a key."""
    monkeypatch.setenv("THE_TOKEN", "tok-123456")
    url = "http://ada:pw@example.com/mcp?key=abcdef"
    web = perdure.mcp(url, headers={"X-Api": "Basic hush-hush"}, token_env="THE_TOKEN")
    assert web.scrubbed(f"401 for {url}: tok-123456, hush-hush") == "401 for …: …, …"
    command = perdure.mcp("uvx x --key=secret", env={"KEY": "value-1", "DEBUG": "1"})
    assert command.scrubbed("value-1 of 1") == "… of 1"
    for server in (web, command):
        told = f"{server!r} {server.target!r} {server.target.shown}"
        assert not any(secret in told for secret in ("pw", "abcdef", "hush", "tok-1", "value-1", "secret"))
