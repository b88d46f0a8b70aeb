"""Workers as real processes: they answer what was left, take over, hand over, and survive runs that kill them."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

from perdure import Queued, Sessions, connect

from .conftest import COMMAND

PATIENCE = 60.0
TOOLS = '''
import asyncio, os, signal
from pathlib import Path
from perdure import tool

@tool(idempotent=True)
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    with Path(f"made-{a}").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if a == 666:
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while Path(f"hold-{a}").exists():
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.5)
    return a + b
'''


async def until(is_so: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait until something is so, and return it. It may be looked up by awaiting."""
    async with asyncio.timeout(seconds):
        while True:
            found = is_so()
            found = await found if inspect.isawaitable(found) else found
            if found:
                return found
            await asyncio.sleep(0.05)


class Working:
    """A `perdure worker` with its lines in a file."""

    def __init__(self, home: Path, *arguments: object, **environment: str) -> None:
        self.lines_file = home / f"worker-{len(list(home.glob('worker-*')))}.log"
        with self.lines_file.open("wb") as lines:
            self.process = subprocess.Popen(
                [*COMMAND, "worker", "--tools", "tools.py", *map(str, arguments)],
                stderr=lines,
                stdout=lines,
                stdin=subprocess.DEVNULL,
                env=os.environ | environment,
            )

    @property
    def said(self) -> str:
        return self.lines_file.read_text()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    async def end(self, *signals: int) -> int:
        """Send signals, one after the other is heard. Return the exit code."""
        for number in signals or [signal.SIGTERM]:
            before = len(self.said)
            self.process.send_signal(number)
            await until(lambda before=before: len(self.said) > before or not self.is_alive)
        await until(lambda: not self.is_alive)
        return self.process.wait()


@pytest.fixture
def tools(home: Path) -> Path:
    (home / "tools.py").write_text(TOOLS)
    return home


@asynccontextmanager
async def working(home: Path, *arguments: object, count: int = 1, **environment: str) -> AsyncIterator[list[Working]]:
    """Workers that run. Those that are still there in the end are killed."""
    made: list[Working] = []
    try:
        made += [Working(home, *arguments, **environment) for _ in range(count)]
        await until(lambda: all("started" in each.said for each in made))
        yield made
    finally:
        for each in made:
            each.process.kill()
            each.process.wait()


async def left(sessions: Sessions, messages: dict[str, str]) -> list[Queued]:
    """Leave a message with each of several sessions."""
    for session_id in messages:
        await sessions.open(session_id)
    return [await sessions.enqueue(session_id, text, key="k") for session_id, text in messages.items()]


async def parked(sessions: Sessions) -> list[str]:
    return [str(each.session_id) for each in (await sessions.queue()).parked]


def store_in(home: Path, engine: str) -> str:
    return postgres_server.url_of(home) if engine == "postgres" else f"sqlite:///{home}/kept.db"


def calls(home: Path, number: int) -> list[str]:
    """Return the processes in which the tool was called with a number."""
    file = home / f"made-{number}"
    return file.read_text().split() if file.exists() else []


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_a_run_that_kills_its_worker_takes_nobody_along(tools: Path, engine: str) -> None:
    """It is parked within seconds, takes down the worker that met it first, and its neighbours are answered."""
    store = store_in(tools, engine)
    async with connect(store, model="offline") as sessions:
        asked = await left(sessions, {f"n{number}": f"what is {number} + 1?" for number in range(1, 7)})
        await left(sessions, {"poison": "what is 666 + 1?"})
        async with working(tools, "--concurrency", 8, count=2, PERDURE_STORE=store) as workers:
            began = time.monotonic()
            await until(lambda: parked(sessions))
            took = time.monotonic() - began
            for number, each in enumerate(asked, 1):
                reply = await each.reply(PATIENCE)
                assert reply is not None
                assert f"{number + 1}" in reply.text
            (survivor,) = (each for each in workers if each.is_alive)
            assert "session poison is parked: its process has died 3 times" in survivor.said
            assert await survivor.end() == 0
        assert await parked(sessions) == ["poison"]
    assert len(calls(tools, 666)) == len(set(calls(tools, 666))) == 3  # each in a process of its own
    assert took < 20


async def test_workers_keep_to_one_rate(tools: Path) -> None:
    """Together they ask the model no more often than `--rate` says; one that is no rate is refused."""
    store = store_in(tools, "sqlite")
    async with connect(store, model="offline") as sessions:
        asked = await left(sessions, {f"n{number}": "Hello." for number in range(7)})
        async with working(tools, "--rate", "offline=4/s", count=2, PERDURE_STORE=store):
            began = time.monotonic()
            await until(sessions.store.running)  # type: ignore[attr-defined]
            for each in asked:
                assert await each.reply(PATIENCE) is not None
        assert time.monotonic() - began > 6 * 0.25 - 0.5
        assert 0 < await sessions.store.reserve("offline", cost=100.0, burst=100.0, most=0.0) < 1  # type: ignore[attr-defined]
    wrong = Working(tools, "--rate", "often", PERDURE_STORE=store)
    assert wrong.process.wait() == 2
    assert "write a rate like '60/m'" in wrong.said
