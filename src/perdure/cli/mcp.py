"""The command that serves sessions to assistants as tools, over the Model Context Protocol."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import wraps
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perdure import __version__
from perdure.cli.errors import advised
from perdure.cli.log_lines import log_lines
from perdure.cli.options import store_command
from perdure.cli.setup import begun, opened, run, use_model_in_run
from perdure.errors import ConfigurationError, InvalidData, PerdureError
from perdure.model.message import Message
from perdure.sessions.graphs import require_no_graph
from perdure.sessions.json_forms import of_hit, of_reply

if TYPE_CHECKING:
    from mcp.server import MCPServer

    from perdure.sessions.sessions import Sessions

T = TypeVar("T")
_MOST = 100
"""The most messages, or hits, that one call returns."""
_AROUND = 10
"""The number of messages shown before and after the one that was asked for."""


@store_command(agent=True)
@click.option("--allow-send", is_flag=True, help="Let the assistant send messages; without it, it can only read.")
def mcp(ctx: click.Context, /, allow_send: bool) -> None:
    """Serve sessions to an assistant as tools: search_sessions and read_session, and with --allow-send also send.

    The assistant's program starts this command, and talks to it over standard input and output (MCP). With --owner it
    reaches this owner's sessions only.
    """
    with log_lines(as_json=False):  # on stderr: standard output belongs to the protocol
        run(_serve(ctx, allow_send))


async def _serve(ctx: click.Context, allow_send: bool) -> None:
    try:
        from mcp.server import MCPServer
    except ImportError as error:
        problem = f"Assistants are served with the package mcp, of at least version 2.1 ({error})."
        raise ConfigurationError(problem, "pip install 'perdure[mcp]'") from None
    server: MCPServer[Any] = MCPServer(
        "perdure", version=__version__, instructions=_told_of(allow_send), log_level="WARNING"
    )
    async with opened(ctx, must_exist=not allow_send, begins=allow_send, serves=True) as sessions:
        _add_reading(server, sessions)
        if allow_send:
            use_model_in_run(ctx, sessions)
            _add_sending(ctx, server, sessions)
        await server.run_stdio_async()


def _told_of(allow_send: bool) -> str:
    more = " `send` says something to the agent of a session, and returns its answer." if allow_send else ""
    return f"Conversations of agents that were kept. Search for words first, then read around a hit.{more}"


def _add_reading(server: MCPServer[Any], sessions: Sessions) -> None:
    from mcp_types import ToolAnnotations

    reads = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @server.tool(annotations=reads)
    @_told
    async def search_sessions(words: str, limit: int = 20) -> dict[str, Any]:
        """Find the messages that have all of some words, in all sessions; the best first.

        `word*` stands for all words that begin so. Each hit has the id of its session, its own id, and a snippet.
        """
        return {"hits": [of_hit(hit) for hit in await sessions.search(words, limit=_bounded(limit))]}

    @server.tool(annotations=reads)
    @_told
    async def read_session(session: str, around: str | None = None, after: int = 0, limit: int = 50) -> dict[str, Any]:
        """Read what was said in the session of an id: a page of it, behind `after` messages.

        With `around`, the id of a message, it is that one with those before and behind it. `next` is the `after` of the
        next page, or null.
        """
        said = await sessions.history(session)
        if around is not None:
            place = next((n for n, each in enumerate(said) if each.id == around), None)
            if place is None:
                raise InvalidData("$.around", "this session has no message of that id")
            after, limit = max(0, place - _AROUND), 2 * _AROUND + 1
        end = max(0, after) + _bounded(limit)
        page = [_shown(each) for each in said[max(0, after) : end]]
        return {"messages": page, "total": len(said), "next": end if end < len(said) else None}


def _add_sending(ctx: click.Context, server: MCPServer[Any], sessions: Sessions) -> None:
    from mcp_types import ToolAnnotations

    @server.tool(annotations=ToolAnnotations(read_only_hint=False, destructive_hint=False))
    @_told
    async def send(text: str, session: str | None = None, key: str | None = None) -> dict[str, Any]:
        """Say something to the agent of a session, or in a new one, and wait for the answer.

        The same key again, in one session or without any, is the same message: nothing is said twice. A call that needs
        a person waits for one, and is in `pending_calls`.
        """
        chat_id = session if session is not None else (await begun(ctx, sessions, _named_by(key))).id
        await require_no_graph(sessions, chat_id)
        # Started, and not sent: if the assistant's program gives up waiting, the run is not stopped.
        started = await sessions.start(chat_id, text, key=key, when_busy="queue")
        return {**of_reply(await started.result())}


def _named_by(key: str | None) -> str | None:
    """Return the id of the new session for a message with a key. The same message then finds the session again."""
    return None if key is None else "mcp-" + blake2b(key.encode(), digest_size=16).hexdigest()


def _told(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return a tool whose errors are told to the assistant."""

    @wraps(verb)
    async def done(*args: Any, **kwargs: Any) -> T:
        from mcp.server.mcpserver.exceptions import ToolError

        try:
            return await verb(*args, **kwargs)
        except PerdureError as error:
            raise ToolError(advised(error)) from error

    return done


def _bounded(limit: int) -> int:
    return max(1, min(limit, _MOST))


def _shown(message: Message) -> dict[str, Any]:
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in message.tool_calls]
    return {"id": message.id, "role": message.role, "text": message.text, **({"calls": calls} if calls else {})}
