"""The two ways to an MCP server: a command that is started, or a URL. The `mcp` package is imported on first use."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from perdure.errors import ConfigurationError
from perdure.model.secrets import without_secrets
from perdure.model.value import clean_text

if TYPE_CHECKING:
    from mcp.client import Transport

logger = logging.getLogger("perdure.mcp")

_SHORTEST_SECRET = 4
"""Shorter values are not secrets, and taking them out of a text would garble it."""
_CONNECT_SECONDS = 30.0
_LAST_LINES = 8


@dataclass(frozen=True)
class Command:
    """A server that is a child process, and talks over its standard input and output."""

    name: str
    words: tuple[str, ...] = field(repr=False)
    env: Mapping[str, str] = field(repr=False)
    cwd: str | None = None

    @property
    def shown(self) -> str:
        """The command as errors show it. Its arguments may be secrets."""
        return self.words[0]

    def secrets(self) -> Set[str]:
        return {value for value in self.env.values() if len(value) >= _SHORTEST_SECRET}

    @asynccontextmanager
    async def reached(self, on_end: Callable[[], None], said: deque[str]) -> AsyncIterator[Transport]:
        """Start the server. Its errors are logged, and the last lines of them kept in `said`."""
        from mcp import StdioServerParameters, stdio_client

        command, *arguments = self.words
        parameters = StdioServerParameters(command=command, args=arguments, env=dict(self.env), cwd=self.cwd)
        async with _errors_of(_Lines(self, said)) as errors:
            yield _Watched(stdio_client(parameters, errlog=errors), on_end)


@dataclass(frozen=True)
class Endpoint:
    """A server that is asked by streamable HTTP."""

    name: str
    url: str = field(repr=False)
    headers: Mapping[str, str] = field(repr=False)
    token_env: str | None = None

    @property
    def shown(self) -> str:
        return without_secrets(self.url)

    def secrets(self) -> Set[str]:
        token = os.environ.get(self.token_env, "") if self.token_env else ""
        hidden = {self.url} if self.url != self.shown else set()
        values = {*self.headers.values(), token}
        # "Bearer abc": the token alone is one too.
        parts = {part for value in values for part in (value, value.rpartition(" ")[2])}
        return {part for part in parts | hidden if len(part) >= _SHORTEST_SECRET}

    @asynccontextmanager
    async def reached(self, on_end: Callable[[], None], said: deque[str]) -> AsyncIterator[Transport]:
        """Open a client with the headers. No time limit on reading: each call has its own."""
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        limits = httpx2.Timeout(_CONNECT_SECONDS, read=None)
        async with httpx2.AsyncClient(headers=self._all_headers(), timeout=limits) as client:
            yield _Watched(streamable_http_client(self.url, http_client=client), on_end)

    def _all_headers(self) -> dict[str, str]:
        """Return the headers. The token is read for every connection: a restarted server may want the next one."""
        if self.token_env is None:
            return dict(self.headers)
        token = os.environ.get(self.token_env)
        if not token:
            raise ConfigurationError(
                f"The environment variable {self.token_env} is not set, and has the token of the MCP server "
                f"{self.name!r}. Set it."
            )
        return {**self.headers, "Authorization": f"Bearer {token}"}


class _Watched:
    """A transport that reports the end of the server's stream: no call is sent to a server that is gone."""

    def __init__(self, transport: Any, on_end: Callable[[], None]) -> None:
        self._transport = transport
        self._on_end = on_end

    async def __aenter__(self) -> tuple[Any, Any]:
        incoming, outgoing = await self._transport.__aenter__()
        return _WatchedStream(incoming, self._on_end), outgoing

    async def __aexit__(self, *raised: Any) -> bool | None:
        outcome: bool | None = await self._transport.__aexit__(*raised)
        return outcome


class _WatchedStream:
    def __init__(self, stream: Any, on_end: Callable[[], None]) -> None:
        self._stream = stream
        self._on_end = on_end

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            return await anext(self._stream)
        except BaseException:  # the end of the stream, an error or a cancellation: no more is read
            self._on_end()
            raise

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(self, *raised: Any) -> bool | None:
        outcome: bool | None = await self._stream.__aexit__(*raised)
        return outcome


@asynccontextmanager
async def _errors_of(lines: _Lines) -> AsyncIterator[Any]:
    """Give a server's standard error a pipe: in the terminal it would write over what a person reads."""
    loop = asyncio.get_running_loop()
    reading, writing = os.pipe()
    errors = os.fdopen(writing, "w")
    try:
        pipe, _ = await loop.connect_read_pipe(lambda: lines, os.fdopen(reading, "rb", buffering=0))
        try:
            yield errors
        finally:
            pipe.close()
    finally:
        errors.close()


class _Lines(asyncio.Protocol):
    """A protocol that logs what a server writes to its standard error, line by line."""

    def __init__(self, command: Command, said: deque[str]) -> None:
        self._command = command
        self._said = said
        self._left = b""

    def data_received(self, data: bytes) -> None:
        # Cut, because a server that never ends a line must not fill the memory.
        *lines, self._left = (self._left + data)[-65_536:].split(b"\n")
        for line in lines:
            text = scrubbed(clean_text(line.decode("utf-8", "replace")).rstrip(), self._command)
            self._said.append(text)
            logger.debug("%s: %s", self._command.name, text)


def scrubbed(text: str, target: Command | Endpoint) -> str:
    """Return a text without the secrets that a server was given: errors are stored, and shown to models."""
    # The longest first: a header contains its token, and its rest would stay.
    for secret in sorted(target.secrets(), key=len, reverse=True):
        text = text.replace(secret, "…")
    return text


def last_words() -> deque[str]:
    """Return a buffer for the last lines that a server writes."""
    return deque(maxlen=_LAST_LINES)
