"""The cost of a search once all is indexed, in SQLite and in PostgreSQL, and of a save with searches beside it."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

from benchmarks.harness import Run, Side, interleaved, ms
from perdure import SqliteStore
from perdure.testing.samples import new_session, say

A_SESSION = 1_000
QUERIES = {
    "word": "needle",
    "words": "needle common",
    "phrase": '"needle common"',
    "prefix": "need*",
    "common": "common",
    "session": "common",
}


async def measure(run: Run) -> None:
    with run.folder() as folder:
        await beside_saves(run, folder)
    messages = run.size(120_000, 1_000_000)
    with run.folder() as folder:
        async with SqliteStore(folder / "bench.db") as store:
            await searches(run, store, "search", messages)
    try:
        from benchmarks.bench_postgres import schema_of, server
    except ImportError as error:
        for name in QUERIES:
            run.skip(f"search.postgres_{name}", str(error))
        return
    with server(run) as dsn:
        async with schema_of(dsn, "bench_searches") as store:
            await searches(run, store, "search.postgres", run.size(40_000, 120_000), analyze=(dsn, "bench_searches"))


async def searches(run: Run, store: Any, prefix: str, messages: int, analyze: tuple[str, str] | None = None) -> None:
    """Search for a word that one message in twelve has, up to 10,000 of them, and for one that all have.

    A PostgreSQL server gets an `analyze` of a schema first, which autovacuum would do after a while.
    """
    draw, every = random.Random(1), max(12, messages // 10_000)
    for start in range(0, messages, A_SESSION):
        said = [words(draw, number, every) for number in range(start, start + A_SESSION)]
        last = await store.create(new_session(*said))
    begin = time.perf_counter()
    await store.search("needle")
    detail = f"{messages:,} messages, indexed in {time.perf_counter() - begin:.0f} s"
    if analyze is not None:
        await analyzed(*analyze)
    for name, query in QUERIES.items():
        within = {"session_id": last.id} if name == "session" else {}
        (found,) = await interleaved(partial(store.search, query, **within), rounds=15)
        run.report(f"{prefix}{'_' if '.' in prefix else '.'}{name}", found.wall * 1000, detail)


async def analyzed(dsn: str, schema: str) -> None:
    import psycopg

    async with await psycopg.AsyncConnection.connect(dsn, autocommit=True) as connection:
        await connection.execute(f"ANALYZE {schema}.word".encode())


def words(draw: random.Random, number: int, every: int) -> str:
    """Return ordinary words, the commonest of them very common; and now and then a needle."""
    ordinary = [f"word{int(20_000 ** draw.random())}" for _ in range(12)]
    return " ".join((*ordinary, *(["needle"] if number % every == 0 else []), "common"))


async def beside_saves(run: Run, folder: Any) -> None:
    async with SqliteStore(folder / "searched.db") as searched, SqliteStore(folder / "plain.db") as plain:
        sides = [saving(store, await store.create(new_session("hello needle"))) for store in (searched, plain)]
        await searched.search("needle")
        with_index, without = await interleaved(*sides, rounds=200)
        assert await searched.search("needle")
    run.report("search.save", with_index.wall / without.wall, f"{ms(with_index.wall)} / {ms(without.wall)}")


def saving(store: SqliteStore, session: Any) -> Side:
    async def save() -> None:
        nonlocal session
        session = await store.save(say(session, *("some words to be found later",) * 4))

    return save
