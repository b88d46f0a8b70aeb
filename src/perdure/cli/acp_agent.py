"""Sessions as an editor's agent. Each request of the Agent Client Protocol is answered by a verb of sessions."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import wraps
from typing import Any, Self, TypeVar

import click
from acp import PROTOCOL_VERSION, RequestError
from acp.interfaces import Client
from acp.schema import (
    AcpMcpServer,
    AgentCapabilities,
    CloseSessionResponse,
    ForkSessionResponse,
    HttpMcpServer,
    Implementation,
    InitializeResponse,
    ListSessionsResponse,
    LoadSessionResponse,
    McpCapabilities,
    McpServerStdio,
    NewSessionResponse,
    PromptCapabilities,
    PromptResponse,
    ResumeSessionResponse,
    SessionCapabilities,
    SessionCloseCapabilities,
    SessionForkCapabilities,
    SessionInfo,
    SessionListCapabilities,
    SessionResumeCapabilities,
    SseMcpServer,
)

import perdure
from perdure.actions.metadata import WriteMetadata
from perdure.cli.acp_turns import Turn
from perdure.cli.acp_updates import Block, message_of, replayed
from perdure.cli.errors import advised
from perdure.cli.setup import begun, opened, use_model_in_run
from perdure.errors import InvalidData, InvalidSessionId, PerdureError, SessionBusy, SessionNotActive, SessionNotFound
from perdure.model.session import SessionInfoList
from perdure.protocols import Toolset
from perdure.server.feeds import Feeds
from perdure.sessions.graphs import require_no_graph
from perdure.sessions.sessions import Sessions

T = TypeVar("T")
Server = HttpMcpServer | SseMcpServer | AcpMcpServer | McpServerStdio
CWD = "cwd"
"""The key in a session's metadata for the directory that an editor works in."""
_PAGE = 50


def _told(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return a verb whose errors are told in the protocol's form."""

    @wraps(verb)
    async def done(*args: Any, **kwargs: Any) -> T:
        try:
            return await verb(*args, **kwargs)
        except (SessionNotFound, InvalidSessionId) as error:  # -32002 is ACP's "not found"; the others are of JSON-RPC
            raise RequestError(-32002, str(error)) from error
        except InvalidData as error:
            raise RequestError(-32602, error.problem, {"path": error.path}) from error
        except PerdureError as error:
            raise RequestError(-32603, advised(error), {"type": type(error).__name__}) from error

    return done


class EditorsAgent:
    """The agent that an editor talks to, with the sessions that a command's options name."""

    def __init__(self, ctx: click.Context) -> None:
        self._ctx = ctx
        self._exits = AsyncExitStack()
        self._editor: Client | None = None
        self._common: Sessions | None = None
        self._own: dict[str, tuple[Sessions, AsyncExitStack]] = {}
        """The connections of sessions for which the editor named MCP servers."""
        self._turns: dict[str, Turn] = {}
        self._directories: dict[str, str] = {}

    async def __aenter__(self) -> Self:
        self._common = await self._connected(self._exits, ())
        return self

    async def __aexit__(self, *raised: Any) -> None:
        for session_id in list(self._own):
            await self._leave(session_id)
        await self._exits.__aexit__(*raised)

    def on_connect(self, conn: Client) -> None:
        self._editor = conn

    async def initialize(self, protocol_version: int, **_: Any) -> InitializeResponse:
        """Return the capabilities of this agent."""
        can = SessionCapabilities(
            list=SessionListCapabilities(),
            fork=SessionForkCapabilities(),
            resume=SessionResumeCapabilities(),
            close=SessionCloseCapabilities(),
        )
        return InitializeResponse(
            protocol_version=PROTOCOL_VERSION,
            agent_capabilities=AgentCapabilities(
                load_session=True,
                prompt_capabilities=PromptCapabilities(image=True, audio=False, embedded_context=True),
                mcp_capabilities=McpCapabilities(http=True, sse=False),
                session_capabilities=can,
            ),
            auth_methods=[],
            agent_info=Implementation(name="perdure", version=perdure.__version__),
        )

    @_told
    async def new_session(self, cwd: str, mcp_servers: Sequence[Server] | None = None, **_: Any) -> NewSessionResponse:
        """Begin a session."""
        _require_absolute(cwd)
        tools = _tools(mcp_servers or ())
        chat = await begun(self._ctx, self._sessions)
        await self._settle_in(chat.id, cwd, tools)
        return NewSessionResponse(session_id=chat.id)

    @_told
    async def load_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Server] | None = None, **_: Any
    ) -> LoadSessionResponse:
        """Show an editor what was said in a session. The next prompt continues it."""
        _require_absolute(cwd)
        await self._settle_in(session_id, cwd, _tools(mcp_servers or ()))
        view = await self._sessions.view(session_id)
        for update in replayed((*view.messages, *view.asked, *view.said), is_over=view.activity == "idle"):
            await self._to_editor.session_update(session_id, update)
        return LoadSessionResponse()

    @_told
    async def resume_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Server] | None = None, **_: Any
    ) -> ResumeSessionResponse:
        """Continue a session that the editor shows already."""
        _require_absolute(cwd)
        await self._settle_in(session_id, cwd, _tools(mcp_servers or ()))
        return ResumeSessionResponse()

    @_told
    async def fork_session(
        self, cwd: str, session_id: str, mcp_servers: Sequence[Server] | None = None, **_: Any
    ) -> ForkSessionResponse:
        """Fork a session."""
        _require_absolute(cwd)
        tools = _tools(mcp_servers or ())
        chat = await self._sessions.fork(session_id)
        await self._settle_in(chat.id, cwd, tools)
        return ForkSessionResponse(session_id=chat.id)

    @_told
    async def list_sessions(self, cwd: str | None = None, cursor: str | None = None, **_: Any) -> ListSessionsResponse:
        """List sessions, the last changed first: all of them, or those of a directory."""
        filters: dict[str, Any] = {} if cwd is None else {"metadata": {CWD: cwd}}
        page: SessionInfoList[Any] = await self._sessions.list(
            top_level=True, order="updated", limit=_PAGE, after=cursor, **filters
        )
        found = [
            SessionInfo(
                session_id=each.id,
                cwd=cwd or await self._directory_of(each.id),
                title=each.title,
                updated_at=each.updated_at.isoformat(),
            )
            for each in page
        ]
        return ListSessionsResponse(sessions=found, next_cursor=page.next)

    @_told
    async def close_session(self, session_id: str, **_: Any) -> CloseSessionResponse:
        """Stop a session's work for the editor, and close the session. The store keeps it."""
        await self.cancel(session_id)
        await self._sessions.close(session_id)
        await self._leave(session_id)
        return CloseSessionResponse()

    @_told
    async def prompt(self, session_id: str, prompt: list[Block], **more: Any) -> PromptResponse:
        """Send a message to a session, and tell the editor what the agent says and does until the run has ended."""
        message = message_of(prompt)
        if session_id in self._turns:
            raise InvalidData("$.sessionId", "a prompt in this session is being answered; cancel it, or wait")
        sessions, _ = self._own.get(session_id, (self._sessions, None))
        found = (await sessions.info(session_id)).id
        await require_no_graph(sessions, found)
        feeds = Feeds(sessions)
        turn = Turn(sessions, feeds, self._to_editor, found, {CWD: await self._directory_of(session_id)})
        self._turns[session_id] = turn
        try:
            return await turn.take(message)
        finally:
            self._turns.pop(session_id, None)
            await feeds.close()

    @_told
    async def cancel(self, session_id: str, **_: Any) -> None:
        """Stop the run of a prompt. What was said until then is kept."""
        turn = self._turns.get(session_id)
        if turn is not None:
            await turn.cancel()

    @property
    def _sessions(self) -> Sessions:
        assert self._common is not None  # it is open
        return self._common

    @property
    def _to_editor(self) -> Client:
        assert self._editor is not None  # the connection has told
        return self._editor

    async def _connected(self, exits: AsyncExitStack, tools: Iterable[Toolset]) -> Sessions:
        made = opened(self._ctx, begins=True, serves=True, filters=(CWD,), tools=tools)
        use_model_in_run(self._ctx, made)
        return await exits.enter_async_context(made)

    async def _leave(self, session_id: str) -> None:
        """Close a session's own connection, if it has one."""
        _, exits = self._own.pop(session_id, (None, AsyncExitStack()))
        await exits.aclose()

    async def _settle_in(self, session_id: str, cwd: str, tools: Sequence[Toolset]) -> None:
        """Store the directory of a session, and connect the tools that the editor brings along."""
        if await self._kept_directory(session_id) != cwd:
            # The directory is a convenience for lists: a session that is being run, or was closed, opens without it.
            with suppress(SessionBusy, SessionNotActive):
                await self._sessions.execute(session_id, WriteMetadata(CWD, cwd))
        self._directories[session_id] = cwd
        await self._leave(session_id)
        if tools:
            exits = AsyncExitStack()
            self._own[session_id] = (await self._connected(exits, tools), exits)

    async def _kept_directory(self, session_id: str) -> str | None:
        kept = (await self._sessions.session(session_id)).state.metadata.get(CWD)
        return kept if isinstance(kept, str) else None

    async def _directory_of(self, session_id: str) -> str:
        """Return the directory of a session. If no editor has set one, return that of this process."""
        return self._directories.get(session_id) or await self._kept_directory(session_id) or os.getcwd()


def _require_absolute(cwd: str) -> None:
    if not os.path.isabs(cwd):
        raise InvalidData("$.cwd", "expected an absolute path")


def _tools(servers: Iterable[Server]) -> list[Toolset]:
    """Return the tools of the MCP servers that an editor names."""
    return [_tools_of(each) for each in servers]


def _tools_of(server: Server) -> Toolset:
    if isinstance(server, McpServerStdio):
        env = {each.name: each.value for each in server.env}
        return perdure.mcp([server.command, *server.args], name=server.name, env=env)
    if isinstance(server, HttpMcpServer):
        headers = {each.name: each.value for each in server.headers}
        return perdure.mcp(server.url, name=server.name, headers=headers)
    raise InvalidData("$.mcpServers", "MCP servers are asked over standard input, or by streamable HTTP")
