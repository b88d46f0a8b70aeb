"""Workers as real processes: they answer messages, take over, hand over, and survive runs that kill them."""

from __future__ import annotations

import asyncio
import inspect
import json
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

pytestmark = pytest.mark.sample(2)  # make torture runs all

PATIENCE = 60.0
TOOLS = '''
import asyncio, os, signal, time
from pathlib import Path
from perdure import tool

def blocked(a):
    """Block a thread for long, once."""
    with Path(f"made-{a}").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    if Path(f"hold-{a}").exists():
        time.sleep(30)

@tool(idempotent=True)
def wait(a: int) -> str:
    """Wait in a thread."""
    blocked(a)
    return f"waited {a}"

@tool(idempotent=True)
async def wait_aside(a: int) -> str:
    """Wait in a thread of the event loop's."""
    await asyncio.to_thread(blocked, a)
    return f"waited {a}"

@tool
def charge(a: int) -> str:
    """Wait in a thread, and not be repeatable."""
    blocked(a)
    return f"charged {a}"

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
    """Wait until a function returns something true, and return that. The function may be async."""
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
        """Send signals, each once the one before is heard. Return the exit code."""
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
    """Run workers. Kill those that are still there in the end."""
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


@pytest.mark.parametrize("engine", ["sqlite", "postgres"] if os.environ.get("PERDURE_TORTURE") else ["postgres"])
async def test_a_run_that_kills_its_worker_takes_nobody_along(tools: Path, engine: str) -> None:
    """It is parked within seconds and takes down only the worker that met it first; its neighbours are answered."""
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


async def begun(home: Path, number: int, times: int = 1) -> int:
    """Wait until the tool was called with a number `times` times. Return the process of the last call."""
    await until(lambda: len(calls(home, number)) >= times)
    return int(calls(home, number)[-1])


def is_running(pid: int) -> bool:
    """Return True if a process is there, and does not only wait for its parent to look."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def answer(asked: Queued) -> str:
    reply = await asked.reply(PATIENCE)
    assert reply is not None
    return reply.text


async def test_what_was_left_is_answered_until_the_worker_is_told_to_stop(tools: Path) -> None:
    """It says in plain lines what it does, and ends with 0."""
    store = store_in(tools, "sqlite")
    async with connect(store, model="offline") as sessions:
        (asked,) = await left(sessions, {"a": "what is 2 + 3?"})
        async with working(tools, "--store", store, "--concurrency", 3) as (worker,):
            assert "5" in await answer(asked)
            assert await worker.end() == 0
    first, second, third = worker.said.splitlines()
    assert first == f"started ({worker.process.pid}): {store}, at most 3 sessions at once"
    assert second.startswith("stopping")  # it may still be looking for more messages
    assert third == "stopped; nothing was left to hand over"


async def test_runs_have_time_to_end(tools: Path) -> None:
    """No new run is begun meanwhile."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        (asked,) = await left(sessions, {"a": "what is 2 + 3?"})
        async with working(tools, "--store", store) as (worker,):
            await begun(tools, 2)
            worker.process.send_signal(signal.SIGTERM)
            await until(lambda: "stopping: 1 session may still take 60 s" in worker.said)
            (late,) = await left(sessions, {"b": "what is 7 + 3?"})
            (tools / "hold-2").unlink()
            assert "5" in await answer(asked)
            await until(lambda: not worker.is_alive)
            assert worker.process.wait() == 0
        assert "stopped; nothing was left to hand over" in worker.said
        assert await late.reply(0.5) is None


@pytest.mark.parametrize(("engine", "way"), [("sqlite", "drain"), ("sqlite", "ctrl-c"), ("postgres", "twice")])
async def test_what_is_left_is_handed_over(tools: Path, engine: str, way: str) -> None:
    """It is handed over after the drain, or at a second signal. Another worker continues the run at once."""
    store = store_in(tools, engine)
    (tools / "hold-2").touch()
    signals = {"drain": [signal.SIGTERM], "twice": [signal.SIGTERM] * 2, "ctrl-c": [signal.SIGINT] * 2}[way]
    async with connect(store, model="offline") as sessions:
        (asked,) = await left(sessions, {"a": "what is 2 + 3?"})
        drain = "0.2s" if way == "drain" else "10min"
        async with working(tools, "--drain", drain, PERDURE_STORE=store) as (worker,):
            await begun(tools, 2)
            assert await worker.end(*signals) == 0
            assert "stopped; handed over: a" in worker.said
        (tools / "hold-2").unlink()
        async with working(tools, "--json", PERDURE_STORE=store) as (other,):
            assert "5" in await answer(asked)
            assert await other.end() == 0
    lines = [json.loads(each) for each in other.said.splitlines()]
    assert [each["event"] for each in lines] == ["started", "stopping", "stopped"]  # no process of its own
    assert lines[0]["concurrency"] == 16
    assert lines[-1]["handed_over"] == []


async def killed_while_it_runs(tools: Path, store: str) -> None:
    """Leave a run that was killed in its tool."""
    async with working(tools, PERDURE_STORE=store) as (worker,):
        await begun(tools, 2)
        worker.process.kill()


async def test_a_process_apart_hands_over_with_its_worker(tools: Path) -> None:
    """It does so after the drain. Its command line has no address of a store."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        (asked,) = await left(sessions, {"a": "what is 2 + 3?"})
        await killed_while_it_runs(tools, store)
        async with working(tools, "--store", store, "--drain", "0.2s", "--lease", "2s") as (worker,):
            apart = await begun(tools, 2, times=2)
            assert apart != worker.process.pid
            words = command_line(apart)
            assert words[-3:] == ["--only", "a", ""]
            assert not any("kept.db" in word for word in words)
            assert await worker.end() == 0
            assert "stopped; handed over: a" in worker.said
            assert not is_running(apart)
        (tools / "hold-2").unlink()
        async with working(tools, PERDURE_STORE=store) as (other,):
            assert "5" in await answer(asked)
            assert "process of its own" not in other.said  # it was handed over, and has not died


@pytest.mark.parametrize(
    ("said", "signals", "answers"),
    [
        ("wait(a=2)", [signal.SIGTERM] * 2, "waited 2"),
        ("wait_aside(a=2)", [signal.SIGINT] * 3, "waited 2"),
        ("charge(a=2)", [signal.SIGTERM], "its outcome is unknown"),
    ],
)
async def test_a_tool_in_a_thread_does_not_keep_the_process(
    tools: Path, said: str, signals: list[int], answers: str
) -> None:
    """It ends with its runs once it has handed over. The tool is repeated only if it may be."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        (asked,) = await left(sessions, {"a": said})
        drain = "0.2s" if len(signals) == 1 else "10min"
        async with working(tools, "--drain", drain, PERDURE_STORE=store) as (worker,):
            first = await begun(tools, 2)
            began = time.monotonic()
            assert await worker.end(*signals) == 0
            assert time.monotonic() - began < 10
            assert worker.said.splitlines()[-1] == "stopped; handed over: a"
            assert "Traceback" not in worker.said
        (tools / "hold-2").unlink()
        async with working(tools, PERDURE_STORE=store) as (other,):
            text = await answer(asked)
            assert await other.end() == 0
        assert answers in text
    repeated = [] if said.startswith("charge") else [str(other.process.pid)]
    assert calls(tools, 2) == [str(first), *repeated]


async def test_a_process_apart_ends_with_a_tool_in_a_thread(tools: Path) -> None:
    """Ctrl-C reaches the worker alone, which tells the process. Nobody waits for it until it is killed."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        await left(sessions, {"a": "wait(a=2)"})
        await killed_while_it_runs(tools, store)
        async with working(tools, "--drain", "0.2s", PERDURE_STORE=store) as (worker,):
            apart = await begun(tools, 2, times=2)
            began = time.monotonic()
            assert await worker.end(signal.SIGINT) == 0
            assert time.monotonic() - began < 5
            assert not is_running(apart)
        assert worker.said.splitlines()[-3:] == [
            "stopping: 1 session may still take 0.2 s; a second signal hands over at once",
            "handing over at once: 1 session",  # which the process apart says
            "stopped; handed over: a",
        ]


async def test_a_process_apart_does_not_outlive_its_worker(tools: Path) -> None:
    """It hands over when its worker is killed."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        await left(sessions, {"a": "what is 2 + 3?"})
        await killed_while_it_runs(tools, store)
        async with working(tools, "--lease", "2s", PERDURE_STORE=store) as (worker,):
            apart = await begun(tools, 2, times=2)
            worker.process.kill()
            await until(lambda: not is_running(apart))
        assert [*await sessions.store.lapsed()] == ["a"]  # type: ignore[attr-defined]


async def test_one_session_only(tools: Path, process: Callable[..., Any]) -> None:
    """The exit code says how the session ended; others are left alone."""
    store = store_in(tools, "sqlite")
    options = ("--store", store, "--tools", "tools.py")
    async with connect(store, model="offline") as sessions:
        asked, other = await left(sessions, {"a": "what is 2 + 3?", "b": "what is 4 + 3?"})
        await asyncio.to_thread(process, "worker", "--only", "a", *options)
        assert "5" in await answer(asked)
        assert await other.reply(0.1) is None
        await sessions.suspend("b")
        await asyncio.to_thread(process, "worker", "--only", "b", *options, code=10)
        assert len(await sessions.drop_waiting("b")) == 1
        told = await asyncio.to_thread(process, "worker", "--only", "b", *options, code=10)
        assert "session b: waits for a person\n" in told.err
        await sessions.enqueue("a", "what is 6 + 3?")
        await sessions.store.claim("a", version=2, owner="host:1", lease=60.0)  # type: ignore[attr-defined]
        await asyncio.to_thread(process, "worker", "--only", "a", *options, code=4)
        await asyncio.to_thread(process, "worker", "--only", "nobody", *options, code=3)


async def test_a_run_that_cannot_go_on_here_says_why(tools: Path, process: Callable[..., Any]) -> None:
    """It is tried again later, where its tools may be."""
    store = store_in(tools, "sqlite")
    (tools / "hold-2").touch()
    async with connect(store, model="offline") as sessions:
        await left(sessions, {"a": "what is 2 + 3?"})
        await killed_while_it_runs(tools, store)
    told = await asyncio.to_thread(process, "worker", "--only", "a", "--store", store, code=1)
    assert "session a could not be run here" in told.err
    assert "'add'" in told.err


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
async def test_a_worker_for_what_is_urgent(tools: Path, engine: str) -> None:
    """It leaves the rest to others."""
    store = store_in(tools, engine)
    async with connect(store, model="offline") as sessions:
        (plain,) = await left(sessions, {"a": "what is 2 + 3?"})
        await sessions.open("b")
        urgent = await sessions.enqueue("b", "what is 4 + 3?", priority=1)
        async with working(tools, "--queue", "high", PERDURE_STORE=store):
            assert "7" in await answer(urgent)
            assert await plain.reply(1.0) is None
        async with working(tools, "--queue", "default", PERDURE_STORE=store):
            assert "5" in await answer(plain)


def test_what_a_worker_refuses(perdure: Callable[..., Any]) -> None:
    """These are an owner, a missing store, and a text that is not a number."""
    assert "Leave --owner" in perdure("worker", "--owner", "ann", code=2).err
    assert "--owner" not in perdure("worker", "--help").out
    told = perdure("worker", "--store", "none.db", code=9).err
    assert "No store is at" in told
    assert "perdure send --new TEXT --no-wait --store none.db --model MODEL" in told
    assert "belongs to one process" in perdure("worker", "--store", "memory://", code=2).err
    assert perdure("worker", "--rate", "often", code=2).err.endswith("is neither\n")
    assert "high, default, or a number" in perdure("worker", "--queue", "low", code=2).err
    for lease in ("soon", "5", ""):
        assert "30s, 10min, 2h, 3d or 4w" in perdure("worker", "--lease", lease, code=2).err
    assert "at least 1 second" in perdure("worker", "--lease", "0s", code=2).err
    assert "more than 0 seconds" in perdure("worker", "--retain-every", "0s", code=2).err
    assert "--tries" in perdure("worker", "--tries", "0", code=2).err


async def test_workers_keep_to_one_rate(tools: Path) -> None:
    """Together they ask the model no more often than `--rate` says; a malformed rate is refused."""
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
