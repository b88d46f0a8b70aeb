"""64 sessions at once in one SQLite file: beside OpenAI Agents, and what the runtime adds to the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.harness import Run, ms, rates
from benchmarks.setting import AGENT, AddTurn, Saver, make_steady, next_turn
from perdure import SessionRuntime, SqliteStore

TASKS = 64


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await beside_openai(run, folder)
    with run.folder() as folder:
        await through_runtime(run, folder)
    with run.folder() as folder:
        await in_loop(run, folder)


async def beside_openai(run: Run, folder: Path) -> None:
    try:
        from agents import SQLiteSession

        from benchmarks.others.with_openai_agents import items
    except ImportError as error:
        run.skip("crowd.openai", f"OpenAI Agents cannot be imported: {error}")
        peer = None
    else:
        sessions = [SQLiteSession(f"session-{number}", folder / "openai.db") for number in range(TASKS)]
        ballast = [item for _ in range(5_000) for item in items(next_turn())]
        await sessions[0].add_items(ballast)  # type: ignore[arg-type]  # dicts will do; its log is long by this

        async def peer(number: int) -> None:
            await sessions[number].add_items(items(next_turn()))  # type: ignore[arg-type]  # dicts will do

    async with SqliteStore(folder / "bench.db") as store:
        savers = await new_savers(store)
        await make_steady(store, folder / "bench.db", 60_000)

        async def ours(number: int) -> None:
            await savers[number]()

        found = await rates(ours, *([peer] if peer else []), tasks=TASKS)
    save = found[0]
    run.report("crowd.cpu", save.cpu * 1000, f"{save.a_second:,.0f} turns a second")
    if peer:
        detail = (
            f"{save.a_second:,.0f} / {found[1].a_second:,.0f} a second; processor {ms(save.cpu)} / {ms(found[1].cpu)}"
        )
        run.report("crowd.openai", save.a_second / found[1].a_second, detail)
        for session in sessions:
            session.close()


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
