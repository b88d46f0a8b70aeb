"""`perdure serve` in a process of its own: open streams and requests at once, its memory, and a very long session."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Self

from benchmarks.harness import Run, interleaved, ms
from benchmarks.setting import filled
from perdure import SessionRuntime, SqliteStore, connect
from perdure.server.tokens import new_token

STREAMS = 500
A_SECOND = 200
OWNERS = 10
CONNECTIONS = 32
"""Connections that requests are sent over, each one at a time."""
LONG, SHORT = 100_000, 100
ROUNDS, WARM_UP = 40, 5
_SAY = 10
"""One of this number of requests sends a message, which the server answers and streams."""


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await under_load(run, folder)
    with run.folder() as folder:
        await long_session(run, folder)


async def under_load(run: Run, folder: Path) -> None:
    """Measure requests beside open streams, on sessions of their own, and the server's memory."""
    seconds = run.size(20, 60)
    secrets = await tokens(folder, [f"owner-{number}" for number in range(OWNERS)])
    async with serving(folder) as server, AsyncExitStack() as stack:
        sessions = await new_sessions(server, secrets)
        streams = [await stack.enter_async_context(Stream.of(server, *each)) for each in sessions]
        await requested(server, sessions, 5)  # until caches and pools have their size
        before, cpu = server.rss(), server.cpu()
        taken = sorted(await requested(server, sessions, seconds))
        heard = sum(stream.events for stream in streams)
        busy = (server.cpu() - cpu) / seconds
        after = server.rss()
    p99 = taken[int(len(taken) * 0.99)]
    detail = f"{len(taken):,} requests in {seconds} s, median {ms(taken[len(taken) // 2])}, longest {ms(taken[-1])}"
    run.report("service.p99", p99 * 1000, f"{detail}; {heard:,} events; {busy:.0%} of a core")
    run.report("service.memory", after / before, f"{before / 2**20:.0f} → {after / 2**20:.0f} MiB")


async def long_session(run: Run, folder: Path) -> None:
    """Measure how a session opens that the server has not read before: each is a fork of the same."""
    async with connect(f"sqlite:///{folder}/served.db", model="offline") as sessions:
        runtime = SessionRuntime(sessions.store)
        long, short = [(await filled(runtime, count)).id for count in (LONG, SHORT)]
        forks = {
            origin: [(await sessions.fork(origin)).id for _ in range(ROUNDS + WARM_UP)] for origin in (long, short)
        }
    (secret,) = await tokens(folder, [None])
    async with serving(folder) as server, Client(server, secret) as client:

        def opening(ids: Iterator[str], *paths: str) -> Callable[[], Awaitable[None]]:
            async def opened() -> None:
                session = next(ids)
                for path in paths:
                    await client.get(path.format(session))

            return opened

        views = {
            "open": ("/api/sessions/{}", "/api/sessions/{}/messages"),
            "page": ("/sessions/{}",),
            "page_said": ("/sessions/{}?view=said",),
        }
        for name, paths in views.items():
            sides = [opening(cycle(ids), *paths) for ids in (forks[long], forks[short])]
            slow, quick = await interleaved(*sides, rounds=ROUNDS, warm_up=WARM_UP)
            run.report(f"service.{name}", slow.wall / quick.wall, f"{ms(slow.wall)} / {ms(quick.wall)}")
        sides = [opening(cycle([origin]), "/sessions/{}?view=said") for origin in (long, short)]
        slow, quick = await interleaved(*sides, rounds=ROUNDS, warm_up=WARM_UP)
        run.report("service.page_own", slow.wall / quick.wall, f"{ms(slow.wall)} / {ms(quick.wall)}")


async def tokens(folder: Path, owners: list[Any]) -> list[str]:
    async with SqliteStore(folder / "served.db") as store:
        return [(await new_token(store, owner))[0] for owner in owners]


async def new_sessions(server: Server, secrets: list[str]) -> list[tuple[str, str]]:
    """Create a session for each stream, and return them with the secrets of their owners."""
    made = [(f"s{number}", secret) for number, secret in zip(range(STREAMS), cycle(secrets), strict=False)]
    async with AsyncExitStack() as stack:
        clients = {secret: await stack.enter_async_context(Client(server, secret)) for secret in secrets}
        for name, secret in made:
            await clients[secret].put(f"/api/sessions/{name}", {})
    return made


async def requested(server: Server, sessions: list[tuple[str, str]], seconds: float) -> list[float]:
    """Send requests at their times. Return each one's time since then: a delayed send counts, too."""
    took: list[float] = []
    loop = asyncio.get_running_loop()
    begin, numbers = loop.time() + 0.1, iter(range(int(seconds * A_SECOND)))

    async def sender(number: int) -> None:
        name, secret = sessions[number * 7 % len(sessions)]
        async with Client(server, secret) as client:
            mine = [each for each in sessions if each[1] == secret]
            for place in numbers:
                due = begin + place / A_SECOND
                await asyncio.sleep(max(0.0, due - loop.time()))
                name, _ = mine[place % len(mine)]
                await one_request(client, place, f"/api/sessions/{name}")
                took.append(loop.time() - due)

    await asyncio.gather(*(sender(number) for number in range(CONNECTIONS)))
    return took


async def one_request(client: Client, place: int, session: str) -> None:
    match place % _SAY:
        case 0:
            await client.post(f"{session}/messages", {"text": f"number {place}", "wait": 0})
        case 1 | 2:
            await client.get("/api/sessions?limit=20")
        case 3 | 4 | 5:
            await client.get(session)
        case _:
            await client.get(f"{session}/messages?limit=20")


class Server(NamedTuple):
    """A server that runs."""

    port: int
    pid: int

    def rss(self) -> int:
        """Return the bytes of memory that it uses."""
        found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    def cpu(self) -> float:
        """Return the seconds of processor time that it has used."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Server]:
    command = [sys.executable, "-m", "perdure", "serve", "--store", f"sqlite:///{folder}/served.db", "--port", "0"]
    command += ["--json", "--model", "offline", "--workers", "16"]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        said = json.loads(await process.stdout.readline())
        yield Server(int(said["url"].rpartition(":")[2]), process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.wait()


class Client:
    """A connection over which requests are sent, one at a time: a client written here, so that it costs little."""

    def __init__(self, server: Server, secret: str) -> None:
        self._server = server
        self._secret = secret

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def get(self, path: str) -> None:
        await self._answered("GET", path, b"")

    async def post(self, path: str, body: Any) -> None:
        await self._answered("POST", path, json.dumps(body).encode())

    async def put(self, path: str, body: Any) -> None:
        await self._answered("PUT", path, json.dumps(body).encode())

    async def _answered(self, method: str, path: str, body: bytes) -> None:
        self._writer.write(head(self._server, self._secret, method, path, body) + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 2"), answer
        found = re.search(rb"content-length: (\d+)", answer)
        await self._reader.readexactly(int(found[1]) if found else 0)


def head(server: Server, secret: str, method: str, path: str, body: bytes = b"", accept: str = "*/*") -> bytes:
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
    lines = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {secret}\r\n"
    return f"{lines}Accept: {accept}\r\n{length}\r\n".encode()


class Stream:
    """A stream of events that is open, and counted."""

    def __init__(self) -> None:
        self.events = 0

    @classmethod
    @asynccontextmanager
    async def of(cls, server: Server, session: str, secret: str) -> AsyncIterator[Self]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        path = f"/api/sessions/{session}/events"
        writer.write(head(server, secret, "GET", path, accept="text/event-stream"))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200"), answer
        stream = cls()
        task = asyncio.ensure_future(stream._count(reader))
        try:
            yield stream
        finally:
            task.cancel()
            writer.close()

    async def _count(self, reader: asyncio.StreamReader) -> None:
        async for line in reader:
            self.events += line.startswith(b"id: ")
