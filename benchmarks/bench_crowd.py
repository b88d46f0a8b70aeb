"""64 sessions at once in one SQLite file: beside OpenAI Agents, and the runtime's cost beside the store's."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import Rate, Run, ms, rates
from benchmarks.setting import AGENT, AddTurn, Saver, make_steady, next_turn
from benchmarks.slow_disk import NotHere, rates_on_slow_disk
from perdure import SessionRuntime, SqliteStore

TASKS = 64


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await beside_openai(run, folder)
    with run.folder() as folder:
        on_slow_disk(run, folder)
    with run.folder() as folder:
        await through_runtime(run, folder)
    with run.folder() as folder:
        await in_loop(run, folder)


async def beside_openai(run: Run, folder: Path) -> None:
    save, *others = await rates_beside_openai(folder)
    run.report("crowd.cpu", save.cpu * 1000, f"{save.a_second:,.0f} turns a second")
    for peer in others:
        run.report("crowd.openai", save.a_second / peer.a_second, in_words(save, peer))
    if not others:
        run.skip("crowd.openai", "OpenAI Agents cannot be imported")


def on_slow_disk(run: Run, folder: Path) -> None:
    """Measure the same in a process in which a sync takes 1 ms: perdure's sessions share one, theirs need one each."""
    try:
        save, *others = rates_on_slow_disk(folder)
    except NotHere as reason:
        run.skip("crowd.disk", str(reason))
        return
    for peer in others:
        run.report("crowd.disk", save.a_second / peer.a_second, in_words(save, peer))
    if not others:
        run.skip("crowd.disk", "OpenAI Agents cannot be imported")


def in_words(ours: Rate, theirs: Rate) -> str:
    return f"{ours.a_second:,.0f} / {theirs.a_second:,.0f} a second; processor {ms(ours.cpu)} / {ms(theirs.cpu)}"


async def rates_beside_openai(folder: Path) -> list[Rate]:
    """Return perdure's rate, and that of OpenAI Agents if it is installed."""
    async with SqliteStore(folder / "bench.db") as store, contextlib.AsyncExitStack() as stack:
        savers = await new_savers(store)
        await make_steady(store, folder / "bench.db", 60_000)

        async def ours(number: int) -> None:
            await savers[number]()

        try:
            sides = [await openai_turns(folder, stack)]
        except ImportError:
            sides = []
        return await rates(ours, *sides, tasks=TASKS)


async def openai_turns(folder: Path, stack: contextlib.AsyncExitStack) -> Callable[[int], Awaitable[object]]:
    from agents import SQLiteSession

    from benchmarks.others.with_openai_agents import items

    sessions = [SQLiteSession(f"session-{number}", folder / "openai.db") for number in range(TASKS)]
    for session in sessions:
        stack.callback(session.close)
    ballast = [item for _ in range(5_000) for item in items(next_turn())]
    await sessions[0].add_items(ballast)  # type: ignore[arg-type]  # dicts will do; its log is long by this

    async def turn_of(number: int) -> None:
        await sessions[number].add_items(items(next_turn()))  # type: ignore[arg-type]  # dicts will do

    return turn_of


async def in_loop(run: Run, folder: Path) -> None:
    """Measure commits in the event loop's own thread, beside those in the store's."""
    paths = folder / "in_loop.db", folder / "thread.db"
    async with SqliteStore(paths[0], commit_in_loop=True) as store, SqliteStore(paths[1]) as usual:
        here, there = await new_savers(store), await new_savers(usual)
        for each, path in zip((store, usual), paths, strict=True):
            await make_steady(each, path, 60_000)
        found, beside = await rates(lambda number: here[number](), lambda number: there[number](), tasks=TASKS)
    detail = f"{found.a_second:,.0f} / {beside.a_second:,.0f} a second; in the thread {ms(beside.cpu)}"
    run.report("crowd.in_loop", found.cpu * 1000, detail)


async def new_savers(store: Any) -> list[Saver]:
    runtime = SessionRuntime(store)
    return [Saver(store, await runtime.create(AGENT)) for _ in range(TASKS)]


async def through_runtime(run: Run, folder: Path) -> None:
    async with SqliteStore(folder / "bench.db") as store:
        savers = await new_savers(store)
        await make_steady(store, folder / "bench.db", 60_000)
        runtime = SessionRuntime(store)
        ids = [(await runtime.create(AGENT)).id for _ in range(TASKS)]
        executed, saved = await rates(
            lambda number: runtime.execute(ids[number], AddTurn()), lambda number: savers[number](), tasks=TASKS
        )
    cpu = f"processor {ms(executed.cpu)} / {ms(saved.cpu)}"
    detail = f"{executed.a_second:,.0f} / {saved.a_second:,.0f} a second; {cpu}"
    run.report("crowd.execute", executed.a_second / saved.a_second, detail)
