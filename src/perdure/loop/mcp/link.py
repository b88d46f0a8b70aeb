"""One connection to an MCP server: opened, used and closed in one task of its own.

The client's task groups have to be left by the task that has entered them, while runs come and go.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from perdure.aio import finish_despite_cancel
from perdure.errors import ConfigurationError
from perdure.loop.mcp.transport import last_words, logger

if TYPE_CHECKING:
    import anyio
    from mcp import Client

    from perdure.loop.mcp.server import McpServer

_START_SECONDS = 60.0
"""Seconds to connect. A launcher may have to download the server first."""
_LEAVE_SECONDS = 10.0
"""Seconds to close. The client gives a process 6 s: to end by itself, after SIGTERM, and after SIGKILL."""
_MOST_TOLD = 1000
_MOST_PAGES = 1000
"""A server whose list never ends must not hold up a run for ever."""


class Link:
    """A server that is being connected to, is connected, or is gone."""

    def __init__(self, server: McpServer) -> None:
        self.is_lost = False
        """True if calls can no longer be sent here: the server is gone, or asked for a new connection."""
        self.why = ""
        """The reason why it could not be connected to."""
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._client: Client | None = None
        self._problem: ConfigurationError | None = None
        self._scope: anyio.CancelScope | None = None
        self._is_settled = asyncio.Event()
        self._leave = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._calls = 0
        self._said = last_words()
        self._listed: Sequence[Mapping[str, Any]] | None = None
        self._changes = 0
        self._listing = asyncio.Lock()
        self._task = self._loop.create_task(self._live(), name=f"perdure mcp {server.name}")

    @property
    def _patience(self) -> float:
        """The seconds that it may take to connect, and to list its tools."""
        return max(_START_SECONDS, self._server.timeout or 0)

    @property
    def is_usable(self) -> bool:
        return not self.is_lost and self.is_of_this_loop

    @property
    def is_of_this_loop(self) -> bool:
        return self._loop is asyncio.get_running_loop()

    @property
    def is_abandoned(self) -> bool:
        """True if its event loop has ended, and with it its task."""
        return self._loop.is_closed()

    async def client(self) -> Client:
        """Return the client once it is connected. Raise ConfigurationError if it cannot be."""
        await self._is_settled.wait()
        if self._problem is not None:
            # Every caller raises this same error: its traceback must not grow with each.
            raise self._problem.with_traceback(None)
        assert self._client is not None
        return self._client

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the connection open while the block lasts, even if new calls go elsewhere by then."""
        self._calls += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    async def listed(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the server lists now. It is asked again if it has announced a change."""
        client = await self.client()
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS  # after it: a missing package is told there

        async with self._listing:
            # Since 2026 servers say how long a list holds, and the client asks again when that time is over.
            if self._listed is None or client.protocol_version in MODERN_PROTOCOL_VERSIONS:
                known = self._changes
                async with asyncio.timeout(self._patience):
                    listed = await _all_tools(client)
                # A change that was announced meanwhile may have come after the page that it is about.
                self._listed = listed if known == self._changes else None
                return listed
            return self._listed

    async def close(self, *, when_idle: bool = False) -> None:
        """Close the connection, and wait until the server's process is gone. A cancellation waits for that too."""
        self.is_lost = True
        if self.is_abandoned:
            return
        if when_idle:
            await self._idle.wait()
        self._leave.set()
        await finish_despite_cancel(self._left())

    async def _left(self) -> None:
        # One that is still connecting has nothing to end in order, and is cancelled at once.
        done, _ = await asyncio.wait({self._task}, timeout=_LEAVE_SECONDS if self._is_settled.is_set() else 0)
        if not done:
            if self._scope is not None:
                self._scope.cancel()
            await asyncio.wait({self._task})

    async def _live(self) -> None:
        try:
            await self._connected_until_left()
        except Exception as error:  # around a request: whatever prevents the connection is told
            self._fail(_cause(error))
        finally:
            self.is_lost = True
            if not self._is_settled.is_set():  # callers that wait for the client must not wait for ever
                self._fail(None)

    async def _connected_until_left(self) -> None:
        if self._leave.is_set():
            return
        anyio, client_class, implementation = _imported()
        with anyio.CancelScope(deadline=anyio.current_time() + self._patience) as scope:
            self._scope = scope
            async with (
                self._server.target.reached(self._note_end, self._said) as transport,
                client_class(transport, client_info=implementation, message_handler=self._hear) as client,
            ):
                scope.deadline = math.inf  # it was for connecting alone
                self._client = client
                self._is_settled.set()
                await self._leave.wait()
        if not self._is_settled.is_set() and not self._leave.is_set():
            raise TimeoutError(f"it did not answer within {self._patience:g} s")

    def _fail(self, error: BaseException | None) -> None:
        if self._is_settled.is_set():
            logger.info("The MCP server %r was left with an error: %s", self._server.name, self._told(error))
            return
        if isinstance(error, ConfigurationError):
            self.why, self._problem = error.what, error
        else:
            self.why = "its connection was closed" if error is None else self._told(error)
            self._problem = _unreachable(self._server, self.why, self._said)
        self._is_settled.set()

    def _told(self, error: BaseException | None) -> str:
        return self._server.scrubbed(f"{type(error).__name__}: {error}".rstrip(". :"))

    def _note_end(self) -> None:
        self.is_lost = True

    async def _hear(self, message: object) -> None:
        from mcp_types import ToolListChangedNotification

        if isinstance(message, ToolListChangedNotification):
            self._listed = None
            self._changes += 1


async def _all_tools(client: Client) -> Sequence[Mapping[str, Any]]:
    """Return the tools of every page, as they are on the wire."""
    found: list[Mapping[str, Any]] = []
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += [each.model_dump(by_alias=True, mode="json", exclude_none=True) for each in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise ConfigurationError(f"An MCP server lists its tools on more than {_MOST_PAGES:,} pages.")


def _imported() -> tuple[Any, Any, Any]:
    try:
        import anyio
        from mcp import Client, Implementation
    except ImportError as error:
        raise ConfigurationError(
            f"MCP servers need the package mcp, of at least version 2.1 ({error}).", "pip install 'perdure[mcp]'"
        ) from None
    return anyio, Client, Implementation(name="perdure", version=_version())


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("perdure")
    except PackageNotFoundError:  # run from its source
        return "0"


def _cause(error: BaseException) -> BaseException:
    """Return the first error inside of a task group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _unreachable(server: McpServer, why: str, said: Iterable[str]) -> ConfigurationError:
    wrote = " / ".join(filter(None, said))[-_MOST_TOLD:].rstrip(". ")
    return ConfigurationError(
        f"The MCP server {server.name!r} ({server.target.shown}) cannot be reached: {why}."
        + (f" It wrote: {wrote}." if wrote else ""),
        "Check its command, or its URL and token, and that it runs by itself.",
    )
