"""Costs that should not grow with a session's past: each at a small and at a large size, in one SQLite file.

A verb that returns more for a larger past is compared by its cost for each thing returned.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import perdure
from benchmarks.harness import Cost, Run, Side, interleaved, median, ms, timed
from benchmarks.setting import checkpoint, settled_size
from perdure import AgentDefinition, InjectMessage, Message, Sessions, SqliteStore, WriteMetadata
from perdure.testing import ScriptedDriver

AGENT = AgentDefinition("bench")
ROUNDS = 7


def connected(path: Path) -> Sessions:
    return perdure.connect(SqliteStore(path), driver=ScriptedDriver(lambda request: "yes"), compaction=None)


async def measure(run: Run) -> None:
    for part in (undo, records, adoptions, forks):
        with run.folder() as folder:
            await part(run, folder)


def compared(
    run: Run, key: str, large: Cost, small: Cost, sizes: tuple[int, int], per: tuple[int, int] = (1, 1)
) -> None:
    """Report a ratio of processor times at two sizes; `per` has the number of things each returned."""
    few, many = small.cpu / per[0], large.cpu / per[1]
    each = "" if per == (1, 1) else " each"
    detail = f"{ms(many)}{each} at {sizes[1]:,} / {ms(few)} at {sizes[0]:,}; {ms(large.wall)} on the clock"
    run.report(key, many / few, detail)


async def undo(run: Run, folder: Path) -> None:
    """Undo the last message, behind versions that did not change the view."""
    sizes = (200, run.size(4_000, 40_000))
    path = folder / "bench.db"
    async with connected(path) as sessions:
        ids = []
        for count in sizes:
            chat = await sessions.open(agent=AGENT)
            await sessions.execute(chat.id, InjectMessage(Message.user("one"), Message.assistant("two")))
            await sessions.execute(chat.id, InjectMessage(Message.user("three")))
            for number in range(count):
                await sessions.execute(chat.id, WriteMetadata("number", number))
            ids.append(chat.id)
    checkpoint(path)
    samples: list[list[Cost]] = [[], []]
    for number in range(ROUNDS):  # of a copy each: an undo works once
        copy = folder / f"copy-{number}.db"
        shutil.copyfile(path, copy)
        async with connected(copy) as sessions:
            for taken, session_id in zip(samples, ids, strict=True):
                await sessions.session(session_id)
                taken.append(await timed(lambda key=session_id: taken_back(sessions, key)))  # type: ignore[misc]
    small, large = map(median, samples)
    compared(run, "growth.undo", large, small, sizes)


async def taken_back(sessions: Sessions, session_id: str) -> None:
    assert await sessions.undo(session_id) == 2


async def records(run: Run, folder: Path) -> None:
    """Read the record and the history of a session with many runs, and single pages of its record."""
    sizes = (100, run.size(1_000, 30_000))
    async with connected(folder / "bench.db") as sessions:
        few, many = [await with_runs(sessions, count) for count in sizes]

        async def growing(key: str, read: Callable[[str], Any], per: tuple[int, int] = (1, 1), rounds: int = 5) -> None:
            small, large = await interleaved(lambda: read(few), lambda: read(many), rounds=rounds, warm_up=1)
            compared(run, key, large, small, sizes, per)

        await growing("growth.record", sessions.record, sizes)
        await growing("growth.history", sessions.history, sizes)
        await growing("growth.page", lambda key: sessions.record(key, limit=20), rounds=30)
        await growing("growth.loop", lambda key: last_loop(sessions, key), rounds=30)
        await growing("growth.events", lambda key: last_events(sessions, key), rounds=30)


async def with_runs(sessions: Sessions, count: int) -> str:
    chat = await sessions.open(agent=AGENT)
    for _ in range(count):
        await chat.send("And now?")
    return chat.id


async def last_loop(sessions: Sessions, session_id: str) -> None:
    (last,) = (await sessions.record(session_id, limit=1)).loops
    await sessions.loop(session_id, last.loop_id)


async def last_events(sessions: Sessions, session_id: str) -> None:
    async for _ in sessions.events(session_id, last=50):
        pass


async def adoptions(run: Run, folder: Path) -> None:
    """Read the history of a session that has adopted many branches."""
    sizes = (30, run.size(300, 3_000))
    async with connected(folder / "bench.db") as sessions:
        few, many = [await with_adoptions(sessions, count) for count in sizes]
        small, large = await interleaved(
            lambda: sessions.history(few), lambda: sessions.history(many), rounds=5, warm_up=1
        )
    compared(run, "growth.adoptions", large, small, sizes, sizes)


async def with_adoptions(sessions: Sessions, count: int) -> str:
    chat = await sessions.open(agent=AGENT)
    for number in range(count):
        branch = await chat.fork()
        await branch.inject(Message.user(f"said {number}"))
        await chat.adopt(branch)
    assert len(await chat.history()) == count
    return chat.id


async def forks(run: Run, folder: Path) -> None:
    """Fork a session that is a fork of a fork of a fork, each with a message of its own."""
    sizes = (6, run.size(300, 6_000))
    path = folder / "bench.db"
    async with connected(path) as sessions:
        few, many = [await with_ancestors(sessions, count) for count in sizes]
        small, large = await interleaved(forking(sessions, few), forking(sessions, many), rounds=20)
        compared(run, "growth.fork", large, small, sizes)
        small, large = await interleaved(
            lambda: sessions.ancestry(few), lambda: sessions.ancestry(many), rounds=20, warm_up=2
        )
        compared(run, "growth.ancestry", large, small, sizes, sizes)
        light, heavy = [await bytes_of(forking(sessions, key), path) for key in (few, many)]
    run.report("growth.fork_bytes", heavy / light, f"{heavy:,.0f} bytes at {sizes[1]:,} / {light:,.0f} at {sizes[0]:,}")


async def with_ancestors(sessions: Sessions, depth: int) -> str:
    chat = await sessions.open(agent=AGENT)
    for number in range(depth):
        await chat.inject(Message.user(f"said at {number}"))
        chat = await chat.fork()
    return chat.id


def forking(sessions: Sessions, session_id: str) -> Side:
    return lambda: sessions.fork(session_id)


async def bytes_of(fork: Side, path: Path) -> float:
    before = settled_size(path)
    for _ in range(50):
        await fork()
    return (settled_size(path) - before) / 50
