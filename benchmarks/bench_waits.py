"""The longest wait of others while one session is read whole, erased or redacted, of many tries."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable
from pathlib import Path

import perdure
from benchmarks.harness import Run, Side
from benchmarks.setting import AGENT, Saver, filled, settled_size
from perdure import SessionRuntime, SqliteStore
from perdure.testing import ScriptedDriver

ROUNDS = 5


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await loads(run, folder)
    with run.folder() as folder:
        await saves(run, folder)
    await turns(run)


async def longest(side: Side, meanwhile: Awaitable[object]) -> float:
    """Return the longest of many calls made until another task had ended."""
    work = asyncio.ensure_future(meanwhile)
    worst = 0.0
    while not work.done():
        start = time.perf_counter()
        await side()
        worst = max(worst, time.perf_counter() - start)
        await asyncio.sleep(0.0005)
    await work
    return worst


async def report(run: Run, key: str, waits: list[float], side: Side) -> None:
    quiet = await longest(side, asyncio.sleep(2))
    detail = (
        f"median of {len(waits)}: {', '.join(f'{each * 1000:.0f}' for each in waits)} ms; alone {quiet * 1000:.0f} ms"
    )
    run.report(key, statistics.median(waits) * 1000, detail)


async def loads(run: Run, folder: Path) -> None:
    """Load a short session from the file beside `history()` of a long one."""
    async with perdure.connect(SqliteStore(folder / "bench.db"), driver=ScriptedDriver([])) as sessions:
        runtime = sessions.runtime
        short, long = (await filled(runtime, 12)).id, (await filled(runtime, 100_000)).id

        async def load() -> None:
            sessions.store.evict(short)  # type: ignore[attr-defined]  # a SqliteStore has it
            await sessions.store.load(short)

        waits = [await longest(load, sessions.history(long)) for _ in range(ROUNDS)]
        await report(run, "waits.load", waits, load)


async def saves(run: Run, folder: Path) -> None:
    """Save a turn while a small session of a large file is erased."""
    path, megabytes = folder / "bench.db", run.size(150, 560)
    async with SqliteStore(path) as store:
        runtime = SessionRuntime(store)
        while settled_size(path) < megabytes * 1e6:
            store.evict((await filled(runtime, 20_000)).id)
        saver = Saver(store, await runtime.create(AGENT))
        waits = []
        for _ in range(ROUNDS):
            erased = await filled(runtime, 12)
            waits.append(await longest(saver, store.delete(erased.id)))
        await report(run, "waits.save", waits, saver)


async def turns(run: Run) -> None:
    """Send to a session in PostgreSQL while one message of another, with many runs, is redacted."""
    try:
        from benchmarks.bench_postgres import schema_of, server
    except ImportError as error:
        run.skip("waits.postgres", str(error))
        return
    driver = ScriptedDriver(lambda request: "yes")
    with server(run) as dsn:
        async with (
            schema_of(dsn, "bench_waits") as store,
            perdure.connect(store, driver=driver, compaction=None) as sessions,
        ):
            chat, other = await sessions.open(agent=AGENT), await sessions.open(agent=AGENT)
            for _ in range(run.size(300, 800)):
                await chat.send("And now?")
            said = (await chat.session()).state.transcript

            async def send() -> None:
                await other.send("And you?")

            waits = [await longest(send, chat.redact([said[2 * number].id])) for number in range(ROUNDS)]
            await report(run, "waits.postgres", waits, send)
