"""A line to a PostgreSQL server that breaks on demand: before a question arrives, or before its answer does.

    async with CuttingProxy(server) as proxy:
        async with PostgresStore(f"postgresql://postgres@127.0.0.1:{proxy.port}/db?sslmode=disable") as store:
            proxy.cut("after", in_rounds=2)       # the second answer from now on is lost, and what was asked is done
            await store.save(session)

It knows enough of the protocol to tell where a question ends, and does not look at what is asked.
"""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

When = Literal["before", "after", "during"]
_QUESTIONS = b"QS"
"""The types of messages after which a client waits for an answer: a simple query, and the end of an extended one."""
# ReadyForQuery: the server sends it behind everything else that answers a question.
_READY = b"Z"


class CuttingProxy:
    """A TCP server on this machine that passes everything on to another server, and cuts a line when it is told to.

    `server` is the path of a socket, or a host and a port. TLS is not understood: connect with `sslmode=disable`.
    """

    def __init__(self, server: Path | tuple[str, int]) -> None:
        self._upstream = server
        self._server: asyncio.Server | None = None
        self._lines: set[asyncio.Task[None]] = set()
        self._when: When | None = None
        self._rounds = 0
        self.cuts = 0
        """The number of lines that were cut."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for line in list(self._lines):
            line.cancel()
        await asyncio.gather(*self._lines, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server is not None, "it is not open"
        return int(self._server.sockets[0].getsockname()[1])

    def cut(self, when: When, *, in_rounds: int = 1) -> None:
        """Cut the line at the `in_rounds`-th question from now on, whichever client asks it.

        `before`: the question does not reach the server. `after`: the server has answered, and the answer is lost.
        `during`: the question is sent, and the line is cut at once.
        """
        self._when, self._rounds = when, in_rounds

    def mend(self) -> None:
        """Stop cutting lines."""
        self._when = None

    def is_to_be_cut(self) -> When | None:
        """Count a question, and tell when to cut its line. Return None if it must not be cut."""
        if self._when is None:
            return None
        self._rounds -= 1
        if self._rounds > 0:
            return None
        when, self._when = self._when, None
        self.cuts += 1
        return when

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._lines.add(task)
        to_server: asyncio.StreamWriter | None = None
        try:
            if isinstance(self._upstream, Path):
                server, to_server = await asyncio.open_unix_connection(self._upstream)
            else:
                server, to_server = await asyncio.open_connection(*self._upstream)
            await _Line(self, client, to_client, server, to_server).run()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # a side has closed its end, or the proxy is closed
        finally:
            self._lines.discard(task)
            for writer in (to_client, to_server):
                if writer is not None:
                    # Not `close`, which would first send what is still in the buffer.
                    writer.transport.abort()


class _Line:
    """A client's connection, and the one to the server that belongs to it."""

    def __init__(
        self,
        proxy: CuttingProxy,
        client: asyncio.StreamReader,
        to_client: asyncio.StreamWriter,
        server: asyncio.StreamReader,
        to_server: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._client, self._to_client = client, to_client
        self._server, self._to_server = server, to_server
        self._is_deaf = False
        self._answered = asyncio.Event()

    async def run(self) -> None:
        answering = asyncio.ensure_future(self._answer())
        asking = asyncio.ensure_future(self._ask())
        _, left = await asyncio.wait({answering, asking}, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
            with suppress(asyncio.CancelledError, OSError, asyncio.IncompleteReadError):
                await task
        for task in (answering, asking):
            # Ask for the exception, or asyncio logs that it was never retrieved.
            if task.done() and not task.cancelled():
                task.exception()

    async def _ask(self) -> None:
        # The first message has no type, only a length.
        self._to_server.write(await _message(self._client))
        while True:
            kind = await self._client.readexactly(1)
            message = kind + await _message(self._client)
            when = self._proxy.is_to_be_cut() if kind in _QUESTIONS else None
            if when == "before":
                return
            # Set before the question is sent: the answer may come while `drain` waits.
            self._is_deaf = when == "after"
            self._answered.clear()
            self._to_server.write(message)
            await self._to_server.drain()
            if when == "after":
                await self._answered.wait()
            if when is not None:
                return

    async def _answer(self) -> None:
        while True:
            kind = await self._server.readexactly(1)
            message = kind + await _message(self._server)
            if self._is_deaf:
                if kind == _READY:
                    self._answered.set()
            else:
                self._to_client.write(message)
                await self._to_client.drain()


async def _message(reader: asyncio.StreamReader) -> bytes:
    """Read the length of a message, and the rest of it."""
    raw = await reader.readexactly(4)
    (length,) = struct.unpack(">I", raw)
    # The length counts its own four bytes.
    return raw + await reader.readexactly(length - 4)
