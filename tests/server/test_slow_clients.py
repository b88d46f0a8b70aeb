"""Clients that send or read slowly, over real sockets: none holds a connection, or memory, for longer than it may."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.server.serving import Served, answering, serving, until

from perdure.server.listening import HttpServer
from perdure.server.settings import Limits, Settings

HEAD, PATIENCE = 0.4, 0.5
LATE = 4.0
"""The seconds after which a connection that is not cut is a finding."""
FAST = Settings(limits=Limits(head=HEAD, patience=PATIENCE))


@dataclass
class Port:
    """A service that is reached over a socket."""

    served: Served
    server: HttpServer
    port: int

    def request(self, method: str, path: str, *more: str, secret: bool = True) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{self.port}", *more]
        if secret:
            lines.append(f"Authorization: {self.served.ada.headers['Authorization']}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


@asynccontextmanager
async def ported(tmp_path: Path) -> AsyncIterator[Port]:
    async with serving(f"sqlite:///{tmp_path}/served.db", FAST) as served, answering(served.service) as (server, url):
        listener = server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8_192)  # so that little data fills it
        await served.ada.put("/api/sessions/s", json={})
        yield Port(served, server, int(url.rpartition(":")[2]))


async def until_cut(reader: asyncio.StreamReader) -> tuple[float, bytes]:
    """Return the seconds until a connection was closed, and the data that came over it."""
    began, seen = time.monotonic(), b""
    try:
        async with asyncio.timeout(LATE):
            while some := await reader.read(65_536):
                seen += some
    except ConnectionResetError:
        pass
    except TimeoutError:
        pytest.fail(f"the connection is still open; it said {seen[:200]!r}")
    return time.monotonic() - began, seen


async def dribble(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """Send a little, again and again, as long as the server accepts it."""
    try:
        while True:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
    except OSError:
        return


@asynccontextmanager
async def dribbling(port: int, first: bytes, piece: bytes) -> AsyncIterator[asyncio.StreamReader]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(first)
    sending = asyncio.ensure_future(dribble(writer, piece))
    try:
        yield reader
    finally:
        sending.cancel()
        writer.close()


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\n", b"GET /heal"], ids=["nothing", "a line", "a word"])
async def test_headers_that_come_slowly_are_cut_off(tmp_path: Path, first: bytes) -> None:
    """Bytes that arrive give a client no more time."""
    async with ported(tmp_path) as at, dribbling(at.port, first, b"x" if first else b"") as reader:
        taken, _ = await until_cut(reader)
    assert HEAD * 0.9 <= taken < LATE


@pytest.mark.parametrize("piece", [b"x", b"\r\n"], ids=["letters", "blank lines"])
async def test_headers_of_a_second_request_are_no_slower(tmp_path: Path, piece: bytes) -> None:
    """A connection that was answered once is not trusted more, with or without a token."""
    async with ported(tmp_path) as at:
        first = at.request("GET", "/healthz", secret=False)
        async with dribbling(at.port, first + b"GET /healthz HTT" * (piece == b"x"), piece) as reader:
            taken, seen = await until_cut(reader)
    assert seen.startswith(b"HTTP/1.1 200")
    assert taken < LATE


async def test_a_body_that_comes_slowly_is_refused(tmp_path: Path) -> None:
    async with ported(tmp_path) as at:
        head = at.request(
            "POST", "/api/sessions/s/messages", "Content-Type: application/json", "Content-Length: 1000000"
        )
        async with dribbling(at.port, head, b" ") as reader:
            taken, seen = await until_cut(reader)
    assert seen.startswith(b"HTTP/1.1 408 ")
    assert b"urn:perdure:problem:body-too-slow" in seen
    assert PATIENCE * 0.9 <= taken < LATE


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("method", "path", "secret"),
    [("GET", "/healthz", False), ("GET", "/api/sessions", True), ("POST", "/api/sessions", False)],
    ids=["open", "takes none", "no token"],
)
async def test_a_body_that_nobody_reads_holds_no_connection(
    tmp_path: Path, method: str, path: str, secret: bool
) -> None:
    async with ported(tmp_path) as at:
        more = ("Content-Type: application/json", "Transfer-Encoding: chunked")
        async with dribbling(at.port, at.request(method, path, *more, secret=secret), b"1\r\nx\r\n") as reader:
            taken, _ = await until_cut(reader)
    assert taken < LATE


async def test_nonsense_in_a_stream_ends_the_stream_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A request's body may turn into nonsense while it is being answered."""
    async with ported(tmp_path) as at:
        head = at.request("GET", "/api/sessions/s/events", "Accept: text/event-stream", "Transfer-Encoding: chunked")
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(head)
        await reader.readuntil(b"perdure")
        writer.write(b"nonsense\r\n")
        await until_cut(reader)
        writer.close()
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


def stalled(port: int) -> socket.socket:
    """Return a connection that reads next to nothing."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    made.connect(("127.0.0.1", port))
    made.setblocking(False)
    return made


async def until_gone(at: Port) -> int:
    """Wait until the server has no connection left. Return the most bytes that it kept for one of them meanwhile."""
    most = 0
    await asyncio.sleep(0.1)  # until it is connected
    async with asyncio.timeout(LATE):
        while there := list(at.server.server_state.connections):
            most = max(most, *(each.transport.get_write_buffer_size() for each in there))
            await asyncio.sleep(0.01)
    return most


async def say_much(at: Port) -> None:
    """Make a session say far more than the buffers of a connection take."""
    for number in range(20):
        given = {"text": f"{number} " + "x" * 100_000, "wait": 20}
        assert (await at.served.ada.post("/api/sessions/s/messages", json=given)).status_code == 200


@pytest.mark.sample(2)
@pytest.mark.parametrize("path", ["/api/sessions/s/events", "/sessions/s/live"])
async def test_a_stream_that_nobody_reads_is_cut_off(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Its buffer does not grow with the session's text, and other listeners get everything."""
    async with ported(tmp_path) as at:
        await say_much(at)
        with stalled(at.port) as client:
            client.send(at.request("GET", path, "Accept: text/event-stream"))
            most = await until_gone(at)
            await until(lambda: at.served.service.open_streams == 0)
    assert 0 < most < 300_000  # of 4 MB: one event, whole
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]


async def test_an_answer_that_nobody_takes_is_cut_off(tmp_path: Path) -> None:
    """An export is one answer, and may be large."""
    async with ported(tmp_path) as at:
        await say_much(at)
        with stalled(at.port) as client:
            client.send(at.request("GET", "/api/sessions/s/export"))
            assert await until_gone(at) > 0


async def test_answers_that_nobody_takes_do_not_pile_up(tmp_path: Path) -> None:
    """Requests may follow each other, from a client without a token."""
    async with ported(tmp_path) as at:
        many = at.request("GET", "/api/sessions", secret=False) * 500
        with stalled(at.port) as client:
            sent = 0
            with contextlib.suppress(BlockingIOError):
                while sent < 40_000_000:
                    sent += client.send(many)
                    await asyncio.sleep(0)
            most = await until_gone(at)
    assert most < 100_000


async def test_a_reader_that_is_slow_but_takes_something_is_kept(tmp_path: Path) -> None:
    async with ported(tmp_path) as at:
        await say_much(at)
        whole = len((await at.served.ada.get("/api/sessions/s/export")).content)
        with stalled(at.port) as client:
            client.send(at.request("GET", "/api/sessions/s/export", "Connection: close"))
            began, seen = time.monotonic(), 0
            client.setblocking(True)
            while some := await asyncio.to_thread(client.recv, 65_536):
                seen += len(some)
                await asyncio.sleep(0.0 if time.monotonic() > began + 3 * PATIENCE else 0.02)
    assert seen > whole
    assert time.monotonic() - began > 2 * PATIENCE
