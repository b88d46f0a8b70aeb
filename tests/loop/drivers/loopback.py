"""A real HTTP server on 127.0.0.1 that answers each request with the next of its replies, and keeps the requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self


@dataclass
class Arrived:
    """A request as it came over the wire."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Reply:
    """An answer in one piece."""

    status: int
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Stream:
    """A streamed answer. `end` says how it ends: normally, with the connection reset, closed early, or never."""

    events: Iterable[bytes]
    end: Literal["whole", "reset", "early", "never"] = "whole"


class Loopback:
    """`async with Loopback(reply, …) as server:` and point a client at `server.url`."""

    def __init__(self, *replies: Reply | Stream) -> None:
        self._replies = list(replies)
        self._handlers: set[asyncio.Task[None]] = set()
        self.requests: list[Arrived] = []
        self.connections = 0
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for handler in self._handlers:
            handler.cancel()
        await asyncio.gather(*self._handlers, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        self.connections += 1
        try:
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                reply = self._replies.pop(0) if self._replies else Reply(500, {"error": {"message": "no reply left"}})
                if not await _write(writer, reply):
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass  # the client, or the test, is done
        finally:
            self._handlers.discard(handler)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Arrived | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Arrived(method, path, headers, json.loads(body) if body else None)


async def _write(writer: asyncio.StreamWriter, reply: Reply | Stream) -> bool:
    """Send a reply; return true if the connection can be used again."""
    if isinstance(reply, Reply):
        body = reply.body.encode() if isinstance(reply.body, str) else json.dumps(reply.body).encode()
        sent = {"content-type": "application/json", "content-length": str(len(body)), **reply.headers}
        writer.write(_head(reply.status, sent) + body)
        await writer.drain()
        return True
    framing = {"connection": "close"} if reply.end == "early" else {"transfer-encoding": "chunked"}
    writer.write(_head(200, {"content-type": "text/event-stream", **framing}))
    for event in reply.events:
        writer.write(event if reply.end == "early" else b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        await asyncio.sleep(0)  # so that events come apart
    if reply.end == "whole":
        writer.write(b"0\r\n\r\n")
        await writer.drain()
    elif reply.end == "reset":
        await asyncio.sleep(0.05)  # so that what was sent is read before the reset
        writer.transport.abort()
    elif reply.end == "never":
        await asyncio.sleep(60)
    return reply.end == "whole"


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} Loopback", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()
