"""`perdure serve` as a process of its own, and a client that reads its streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from perdure.server.tokens import new_token
from perdure.stores.sqlite import SqliteStore

PATIENCE = 60.0
TOOLS = '''
import asyncio
from pathlib import Path
from perdure import tool

@tool(idempotent=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    Path(f"begun-{a}").touch()
    while Path(f"hold-{a}").exists():
        await asyncio.sleep(0.02)
    return a + b
'''


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


class Event(NamedTuple):
    """One event of a stream."""

    kind: str
    id: int | None
    data: Any


class Serving:
    """A server in a directory with its store and tools. It can be killed, and started again."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.said: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        (where / "tools.py").write_text(TOOLS)

    def start(self, *options: str, **environment: str) -> None:
        """Start it, and wait until it answers."""
        shared = ("--store", "sqlite:///served.db", "--json", "--port", str(self.port))
        command = [sys.executable, "-m", "perdure", "serve", *shared, *options]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PERDURE_")}
        with (self.where / "stderr").open("a") as log:
            self._process = subprocess.Popen(
                command, cwd=self.where, env=inherited | environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log
        self.said = json.loads(line)
        until(lambda: httpx.get(f"{self.url}/healthz").status_code == 200)

    def start_working(self, *options: str, **environment: str) -> None:
        self.start("--tools", "tools.py", "--model", "offline", *options, **environment)

    @property
    def log(self) -> str:
        return (self.where / "stderr").read_text()

    def signal(self, number: int = signal.SIGTERM) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end, and return its exit code."""
        assert self._process is not None
        code = self._process.wait(PATIENCE)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL

    def client(self, owner: str | None = None, **options: Any) -> httpx.Client:
        """Return a client with a token."""
        headers = {"Authorization": f"Bearer {asyncio.run(self._token(owner))}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=PATIENCE, **options)

    async def _token(self, owner: str | None) -> str:
        async with SqliteStore(self.where / "served.db") as store:
            secret, _ = await new_token(store, owner)
            return secret

    def hold(self, number: int) -> None:
        (self.where / f"hold-{number}").touch()

    def release(self, number: int) -> None:
        (self.where / f"hold-{number}").unlink()

    def until_begun(self, number: int) -> None:
        until((self.where / f"begun-{number}").exists)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self.ended()


@contextmanager
def served_in(where: Path) -> Iterator[Serving]:
    server = Serving(where)
    try:
        yield server
    finally:
        server.close()


def until(is_so: Any, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if is_so():
                return
        except httpx.TransportError:  # it is being started
            pass
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


@contextmanager
def stream(client: httpx.Client, session: str, after: int = 0) -> Iterator[Iterator[Event]]:
    """Open the stream of a session behind an event, as a browser does when it comes back."""
    headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
    with client.stream("GET", f"/api/sessions/{session}/events", headers=headers) as response:
        assert response.status_code == 200, response.read()
        yield events_in(response.iter_lines())


def events_in(lines: Iterator[str]) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in lines:
        if line.startswith(":"):
            continue
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            place = int(fields["id"]) if "id" in fields else None
            yield Event(fields["event"], place, json.loads(fields["data"]))
            fields = {}
