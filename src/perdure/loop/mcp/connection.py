"""An MCP server as one connection of perdure uses it: started when it is first needed, and again if it is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perdure.aio import finish_despite_cancel
from perdure.errors import ConfigurationError, ToolError, ToolUnavailable
from perdure.loop.mcp.content import said_in, value_of
from perdure.loop.mcp.link import Link
from perdure.loop.mcp.transport import Endpoint
from perdure.model.value import JSON, thawed

if TYPE_CHECKING:
    from mcp import Client
    from mcp.shared.dispatcher import ProgressFnT
    from mcp_types import CallToolResult

    from perdure.loop.mcp.server import McpServer
    from perdure.loop.mcp.tool import McpTool
    from perdure.protocols import ToolContext


class _Unlisted(ConfigurationError):
    """An error of a server that has answered badly, or is gone. It is tried once more."""


class McpConnection:
    """The open tools of a server, for all runs of a connection."""

    def __init__(self, server: McpServer) -> None:
        self._server = server
        self._link: Link | None = None
        self._tools: tuple[McpTool, ...] = ()
        self._listed: Sequence[Mapping[str, Any]] | None = None
        self._lost: dict[Link, asyncio.Task[None]] = {}
        """Connections that are lost for new calls, each with the task that closes it after its last call."""

    async def tools(self) -> Sequence[McpTool]:
        """Return the tools that the server has now. It is started if it is not running."""
        try:
            listed = await self._list()
        except _Unlisted:
            listed = await self._list()  # it was gone unnoticed, and is started again
        if listed != self._listed:
            self._tools = self._server.tools_in(listed, self)
            self._listed = listed
        return self._tools

    async def call(self, name: str, arguments: Mapping[str, Any], context: ToolContext) -> JSON:
        """Call a tool of the server. Raise ToolError with the fault it reports, or ToolUnavailable if it is gone."""
        link = self._link_for_call()
        with link.in_use():
            try:
                client = await link.client()
            except ConfigurationError as error:
                raise ToolUnavailable(self._server.name, f"{link.why}.", was_sent=False) from error
            result = await _with_progress(partial(self._asked, link, client, name, thawed(arguments)), context)
        if result.is_error:
            raise ToolError(said_in(result) or f"{name} has failed, and does not say why.")
        return value_of(result)

    async def close(self) -> None:
        """Close the connections, and wait until the server's process is gone."""
        links = [*self._lost, *([self._link] if self._link is not None else [])]
        self._link, self._listed, self._tools = None, None, ()
        await finish_despite_cancel(_closed(links))
        for ending in self._lost.values():
            ending.cancel()
        self._lost.clear()

    async def _list(self) -> Sequence[Mapping[str, Any]]:
        link = self._linked()
        try:
            with link.in_use():
                return await link.listed()
        except ConfigurationError:
            raise
        except Exception as error:  # around a request: without a list there is nothing to run with
            link.is_lost = True
            why = self._server.scrubbed(f"{type(error).__name__}: {error}".rstrip(". :"))
            kind = ConfigurationError if isinstance(error, TimeoutError) else _Unlisted
            what = f"The MCP server {self._server.name!r} cannot list its tools: {why}."
            raise kind(what, "Check that it runs by itself.") from error

    def _linked(self) -> Link:
        """Return a connection that can be used. Begin one if there is none."""
        link = self._link
        if link is not None and link.is_usable:
            return link
        if link is not None and not link.is_of_this_loop and not link.is_abandoned:
            raise ConfigurationError(
                f"The MCP server {self._server.name!r} belongs to another event loop, which is still running.",
                "Call connect(…) in each event loop.",
            )
        if link is not None:
            self._end(link)
        self._link = Link(self._server)
        return self._link

    def _link_for_call(self) -> Link:
        if self._link is None:
            raise ToolUnavailable(self._server.name, "Its connection was closed.", was_sent=False)
        return self._linked()

    def _end(self, link: Link) -> None:
        """Close a lost connection once the calls that it still has under way are answered."""
        if link.is_abandoned:
            return
        self._lost[link] = ending = asyncio.create_task(link.close(when_idle=True))
        ending.add_done_callback(lambda _: self._lost.pop(link, None))

    async def _asked(
        self, link: Link, client: Client, name: str, arguments: dict[str, Any], on_progress: ProgressFnT
    ) -> CallToolResult:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        try:
            return await client.call_tool(name, arguments, progress_callback=on_progress)
        except MCPError as error:
            said = self._server.scrubbed(error.message)
            is_forgotten = isinstance(self._server.target, Endpoint) and error.code == INVALID_REQUEST
            # A server that was restarted does not know this connection any more, and says so.
            if link.is_lost or is_forgotten or error.code == CONNECTION_CLOSED:
                link.is_lost = True
                raise ToolUnavailable(self._server.name, f"{said}.") from None
            raise ToolError(f"The MCP server {self._server.name!r} refused the call: {said} ({error.code}).") from None
        except Exception as error:  # around a request: what the client makes of an answer that is not one
            said = self._server.scrubbed(f"{type(error).__name__}: {error}")
            raise ToolError(f"The answer of the MCP server {self._server.name!r} cannot be used: {said}") from error


async def _with_progress(
    ask: Callable[[ProgressFnT], Coroutine[Any, Any, CallToolResult]], context: ToolContext
) -> CallToolResult:
    """Ask a server, and tell its progress from the task that waits for the answer.

    In the client's own task, a slow listener would hold up every call of the server. And a record that cannot be
    written would not end the run.
    """
    told: asyncio.Queue[JSON] = asyncio.Queue()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        facts = {"progress": progress, "total": total, "message": message}
        told.put_nowait({name: fact for name, fact in facts.items() if fact is not None})

    asking = asyncio.create_task(ask(note))
    asking.add_done_callback(lambda _: told.put_nowait(None))
    try:
        while (news := await told.get()) is not None:
            await context.progress(news)
        return asking.result()
    finally:
        asking.cancel()  # which tells the server, unless it has answered
        await asyncio.gather(asking, return_exceptions=True)


async def _closed(links: Sequence[Link]) -> None:
    await asyncio.gather(*(link.close() for link in links))
