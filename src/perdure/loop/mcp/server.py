"""`perdure.mcp`, with which a user describes an MCP server. Nothing is started here."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import PurePath
from typing import Any, Literal

from perdure.errors import ConfigurationError, InvalidData
from perdure.loop.mcp.connection import McpConnection
from perdure.loop.mcp.tool import McpTool
from perdure.loop.mcp.transport import Command, Endpoint, scrubbed
from perdure.loop.tools import OnUnknown, check_tool_options, is_tool_name
from perdure.model.checks import expect, expect_several, expect_text
from perdure.model.secrets import without_secrets
from perdure.model.value import brief

ApprovalOf = bool | Literal["destructive"] | Collection[str] | Callable[[str, Mapping[str, Any]], bool]
"""The calls that wait for a person: all, those of tools that may destroy something, or those of named tools. A function
of the tool's name and its arguments can select them too."""

_NO_NAME = re.compile(r"[^A-Za-z0-9_-]")
_EXPECTED = "expected the command or the URL of an MCP server, such as 'uvx mcp-server-time'"
# These words say how a server is started, and not which: errors name it by the word after them.
_LAUNCHERS = {
    "uvx",
    "uv",
    "npx",
    "node",
    "bunx",
    "python",
    "python3",
    "pipx",
    "docker",
    "podman",
    "run",
    "tool",
    "exec",
}
_TELLING = re.compile(r"[\w@./][\w@./-]*")
_URL = re.compile(r"https?://", re.IGNORECASE)


def mcp(
    what: str | Sequence[str | PathLike[str]],
    *,
    name: str | None = None,
    only: Iterable[str] = (),
    leave_out: Iterable[str] = (),
    prefix: str | None = None,
    needs_approval: ApprovalOf | None = None,
    on_unknown: OnUnknown | Mapping[str, OnUnknown] | None = None,
    timeout: float | None = 60.0,
    env: Mapping[str, str] | None = None,
    cwd: str | PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    token_env: str | None = None,
) -> McpServer:
    """Return the tools of an MCP server, for `tools=[…]`: of a command that is started, or of a URL.

    A command is a text, which is split as a shell does, or a list of words. The server talks over its standard input
    and output. It gets few environment variables (PATH, HOME and the like) and those of `env`. A URL is asked by
    streamable HTTP, with `headers`, and with the bearer token that the environment variable `token_env` has.

    The tools are all that the server lists, or `only` some, without those of `leave_out`; `prefix` goes before their
    names. `only`, `leave_out`, `needs_approval` and `on_unknown` use the names that the server gives. A call has
    `timeout` seconds; None means no limit.

    `needs_approval` is True, "destructive", a set of names, or a function of a name and the arguments. "destructive"
    means tools that the server does not call read-only or harmless. `on_unknown` says what happens to a call with an
    unknown outcome after a crash, for all tools or by name: "error", "rerun" or "ask". By default, a tool that the
    server calls read-only or idempotent is called again. For any other, the model is told. `name` is the name under
    which errors speak of the server, and `cwd` the directory that a command is started in. The command or URL is
    `what`.
    """
    target = _target_of(what, env, cwd, headers, token_env)
    return McpServer(
        target if name is None else replace(target, name=expect_text(name, "$.name", blank=False)),
        only=_names(only, "$.only"),
        leave_out=_names(leave_out, "$.leave_out"),
        prefix=_checked_prefix(prefix),
        needs_approval=_checked_approval(needs_approval),
        on_unknown=on_unknown,
        timeout=timeout,
    )


class McpServer:
    """A server as it was described: a `Toolset`. Every connection starts its own. `perdure.mcp` makes one."""

    def __init__(
        self,
        target: Command | Endpoint,
        *,
        only: frozenset[str],
        leave_out: frozenset[str],
        prefix: str,
        needs_approval: ApprovalOf | None,
        on_unknown: OnUnknown | Mapping[str, OnUnknown] | None,
        timeout: float | None,
    ) -> None:
        self.target = target
        self.name = target.name
        self.timeout = timeout
        self._only = only
        self._leave_out = leave_out
        self._prefix = prefix
        self._needs_approval = needs_approval
        self._on_unknown = on_unknown
        for each in on_unknown.values() if isinstance(on_unknown, Mapping) else (on_unknown,):
            check_tool_options(f"of {self.name}", timeout, each)

    def open_tools(self) -> McpConnection:
        """Return the server as one connection uses it."""
        return McpConnection(self)

    def tools_in(self, listed: Sequence[Mapping[str, Any]], connection: McpConnection) -> tuple[McpTool, ...]:
        """Return those of the listed tools that are wanted."""
        known = [str(each["name"]) for each in listed]
        self._require_known(known)
        wanted = [each for each in listed if self._is_wanted(each["name"])]
        return tuple(self._tool(each, connection) for each in wanted)

    def waits(self, tool: McpTool, arguments: Mapping[str, Any]) -> bool:
        """Tell whether a person must agree to a call."""
        wanted = self._needs_approval
        if wanted is None or isinstance(wanted, bool):
            return bool(wanted)
        if wanted == "destructive":
            return tool.may_destroy
        if callable(wanted):
            return bool(wanted(tool.name_there, arguments))
        return tool.name_there in wanted

    def on_unknown_of(self, name: str, *, idempotent: bool) -> OnUnknown:
        given = self._on_unknown.get(name) if isinstance(self._on_unknown, Mapping) else self._on_unknown
        return given or ("rerun" if idempotent else "error")

    def scrubbed(self, text: str) -> str:
        """Return a text without the secrets that this server was given."""
        return scrubbed(text, self.target)

    def __repr__(self) -> str:
        return f"<mcp {self.name}>"

    def _is_wanted(self, name: str) -> bool:
        return name not in self._leave_out and (not self._only or name in self._only)

    def _require_known(self, known: Sequence[str]) -> None:
        by_name = self._needs_approval
        asked = frozenset(by_name) if isinstance(by_name, frozenset) else frozenset[str]()
        kept = frozenset(self._on_unknown) if isinstance(self._on_unknown, Mapping) else frozenset[str]()
        options = {"only": self._only, "leave_out": self._leave_out, "needs_approval": asked, "on_unknown": kept}
        for option, names in options.items():
            for name in sorted(names.difference(known)):
                has = ", ".join(sorted(known)) or "none"
                what = f"The MCP server {self.name!r} has no tool named {name!r}. It has: {has}."
                raise ConfigurationError(what, f"Correct {option}= of perdure.mcp(…).", missing="tool", name=name)

    def _tool(self, listed: Mapping[str, Any], connection: McpConnection) -> McpTool:
        there = str(listed["name"])
        here = self._prefix + _NO_NAME.sub("_", there)
        if not is_tool_name(here):
            raise ConfigurationError(
                f"A tool of the MCP server {self.name!r} cannot be named {here!r}: models take names of up to 64 "
                f"letters, digits, _ and -, which do not begin with a digit.",
                f"Leave it out: perdure.mcp(…, leave_out=[{there!r}]), or give another prefix=.",
            )
        return McpTool(here, listed, self, connection)


def _target_of(
    what: object,
    env: Mapping[str, str] | None,
    cwd: str | PathLike[str] | None,
    headers: Mapping[str, str] | None,
    token_env: str | None,
) -> Command | Endpoint:
    if isinstance(what, str) and _URL.match(what):
        if env is not None or cwd is not None:
            raise ConfigurationError("env= and cwd= are for an MCP server that is started by a command, not for a URL.")
        token = None if token_env is None else expect_text(token_env, "$.token_env", blank=False)
        return Endpoint(_endpoint_name(what), what, _texts(headers, "$.headers"), token)
    if headers is not None or token_env is not None:
        raise ConfigurationError("headers= and token_env= are for an MCP server with a URL. Use env= for a command.")
    words = _words(what)
    return Command(_command_name(words), words, _texts(env, "$.env"), None if cwd is None else fspath(cwd))


def _words(what: object) -> tuple[str, ...]:
    if isinstance(what, str):
        if "://" in what.partition(" ")[0]:
            raise ConfigurationError(f"{without_secrets(what)!r} is not a URL of an MCP server: use http or https.")
        try:
            words = shlex.split(what)
        except ValueError as error:
            raise InvalidData("$.what", f"the command cannot be split into words: {error}") from None
    else:
        if isinstance(what, bytes | Mapping) or not isinstance(what, Iterable):
            raise InvalidData("$.what", f"{_EXPECTED}; got {brief(what)}")
        given: tuple[Any, ...] = tuple(what)
        words = [expect_text(fspath(each) if isinstance(each, PathLike) else each, "$.what") for each in given]
    if not words or not words[0].strip():
        raise InvalidData("$.what", _EXPECTED)
    return tuple(words)


def _command_name(words: Sequence[str]) -> str:
    """Return the name of a server in messages: the first word that is not a launcher or an option."""
    telling = (word for word in words if _TELLING.fullmatch(word) and PurePath(word).name not in _LAUNCHERS)
    return PurePath(next(telling, words[0])).stem


def _endpoint_name(url: str) -> str:
    return re.split(r"[/?#]", without_secrets(url).partition("://")[2])[0]


def _names(given: Iterable[str], path: str) -> frozenset[str]:
    return frozenset(expect_text(each, path) for each in expect_several(given, path))


def _texts(given: Mapping[str, str] | None, path: str) -> Mapping[str, str]:
    expect(given or {}, Mapping, path)  # type: ignore[type-abstract]
    return {expect_text(name, path): expect_text(value, f"{path}.{name}") for name, value in (given or {}).items()}


def _checked_prefix(prefix: str | None) -> str:
    if prefix and not is_tool_name(expect_text(prefix, "$.prefix")):
        raise ConfigurationError(f"{prefix!r} cannot begin a tool's name: use letters, digits, _ and -, such as 'fs_'.")
    return prefix or ""


def _checked_approval(given: Any) -> ApprovalOf | None:
    if given is None or isinstance(given, bool) or given == "destructive" or callable(given):
        return given  # type: ignore[no-any-return]
    return _names(given, "$.needs_approval")
