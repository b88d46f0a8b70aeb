"""PostgresStore on a real server: what a save costs, what a crowd of tasks and of processes does, how lists grow.

The server is the one that PERDURE_TEST_POSTGRES names, or one out of a wheel, with its own defaults: it does sync.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psycopg
from tests import postgres_server

from benchmarks.bench_core import AGENT, filled, turn
from benchmarks.harness import Figure, interleaved, ms, rate
from perdure import AgentSession, PerdureError, PostgresStore, SessionConflict, SessionRuntime
from perdure.testing.samples import new_session

PROCESSES, TASKS = 4, 16
SAVES = 313 * PROCESSES * TASKS  # a little over 20,000
FEW, MANY = 1_000, 1_000_000
SEARCHED = 120_000


@asynccontextmanager
async def beside(dsn: str, schema: str) -> AsyncIterator[psycopg.AsyncConnection[Any]]:
    """A bare connection to the schema of a store."""
    async with await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, prepare_threshold=0, options=f"-c search_path={schema}"
    ) as connection:
        yield connection


class Saver:
    """Saves one turn after another onto one session."""

    def __init__(self, store: PostgresStore, session: AgentSession) -> None:
        self.store = store
        self.session = session

    async def __call__(self) -> None:
        state = self.session.state.with_messages(*turn())
        self.session = await self.store.save(self.session.with_state(state))


class BareTransaction:
    """The same rows in the same tables, straight through psycopg: the floor of a save."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], session: AgentSession) -> None:
        self._connection = connection
        self._id = str(session.id)

    async def __call__(self) -> None:
        rows = [msgspec.json.encode(message) for message in turn()]
        async with self._connection.transaction():
            found = await self._connection.execute(
                "UPDATE session SET version = version + 1, updated = %s, msg_end = msg_end + 4, op = 'bare'"
                " WHERE id = %s RETURNING sid, log, version, msg_end",
                (time.time(), self._id),
            )
            sid, log, version, end = await found.fetchone()  # type: ignore[misc]
            numbered = [(log, end - 4 + place, zlib.crc32(row), row) for place, row in enumerate(rows)]
            async with self._connection.cursor() as cursor:
                await cursor.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (%s, %s, %s, %s)", numbered)
            await self._connection.execute(
                "INSERT INTO head (sid, version, crc, op, hashes, wanted, body) VALUES (%s, %s, 0, '', '{}', '{}', %s)",
                (sid, version, b"h" * 440),
            )


async def save_figures(dsn: str) -> list[Figure]:
    async with PostgresStore(dsn, schema="saves") as store, beside(dsn, "saves") as connection:
        runtime = SessionRuntime(store)
        savers = [Saver(store, await filled(runtime, count)) for count in (0, 100_000)]
        bare = BareTransaction(connection, await runtime.create(AGENT))
        empty, many, floor = await interleaved(*savers, bare, rounds=300)
    detail = f"0: {ms(empty)}, 100k: {ms(many)}, bare: {ms(floor)}"
    return [
        Figure("save over the same bare transaction", empty / floor, 1.5, detail=detail),
        Figure("save at 100,000 messages over save at 0", many / empty, 1.33, detail=detail),
    ]


async def rate_figures(dsn: str) -> list[Figure]:
    async with PostgresStore(dsn, schema="rates") as store:
        runtime = SessionRuntime(store)
        savers = [Saver(store, await runtime.create(AGENT)) for _ in range(64)]

        async def save(number: int) -> int:
            await savers[number]()
            return 1

        ones, crowds = [], []
        for _ in range(3):
            ones.append(await rate(save, 1, seconds=1.5))
            crowds.append(await rate(save, 64, seconds=1.5))
        one, crowd = sorted(ones)[1], sorted(crowds)[1]
    detail = f"1 task: {one:,.0f}/s, 64 tasks: {crowd:,.0f}/s"
    return [Figure("64 tasks saving over one task", crowd / one, 3, at_least=True, detail=detail)]


async def crowd_figures(dsn: str) -> list[Figure]:
    """Many processes, first on sessions of their own, then all on one."""
    async with PostgresStore(dsn, schema="crowd") as store:
        apart, seconds = await _processes(dsn, "apart", SAVES // PROCESSES // TASKS)
        missing = 0
        for number in range(PROCESSES * TASKS):
            loaded = await store.load(f"apart-{number // TASKS}-{number % TASKS}")
            missing += SAVES // PROCESSES // TASKS + 1 - (loaded.version if loaded else 0)
        await store.create(new_session(id="one", definition=AGENT))
        together, _ = await _processes(dsn, "together", 50)
        one = await store.load("one")
        assert one is not None
    won = sum(each["saved"] for each in together)
    saved = sum(each["saved"] for each in apart)
    failed = sum(each["conflicts"] + each["errors"] for each in apart)
    detail = f"{saved:,} saves by {PROCESSES} processes of {TASKS} tasks, {saved / seconds:,.0f}/s with their start"
    return [
        Figure("conflicts and errors on different sessions", failed, 0, unit="", detail=detail),
        Figure("saves that were answered and are not there", missing, 0, unit="", detail=detail),
        Figure(
            "versions of one session without exactly one winner",
            abs(one.version - 1 - won) + sum(each["errors"] for each in together),
            0,
            unit="",
            detail=f"{won} saves won, {sum(each['conflicts'] for each in together):,} were told of a conflict",
        ),
    ]


async def _processes(dsn: str, how: str, saves: int) -> tuple[list[dict[str, int]], float]:
    start = time.perf_counter()
    started = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks.bench_postgres", dsn, how, str(number), str(saves)),
            stdout=asyncio.subprocess.PIPE,
        )
        for number in range(PROCESSES)
    ]
    outputs = [(await process.communicate())[0] for process in started]
    return [json.loads(output) for output in outputs], time.perf_counter() - start


async def _one_process(dsn: str, how: str, number: int, saves: int) -> None:
    """What each process of a crowd does; it prints how it went."""
    counts = {"saved": 0, "conflicts": 0, "errors": 0}

    async def task(store: PostgresStore, place: int) -> None:
        if how == "apart":
            session = await store.create(new_session(id=f"apart-{number}-{place}", definition=AGENT))
        for _ in range(saves):
            if how == "together":
                loaded = await store.load("one")
                assert loaded is not None
                session = loaded
            try:
                session = await store.save(session.with_state(session.state.with_messages(*turn()[:1])))
                counts["saved"] += 1
            except SessionConflict:
                counts["conflicts"] += 1
            except PerdureError:
                counts["errors"] += 1

    async with PostgresStore(dsn, schema="crowd") as store:
        await asyncio.gather(*(task(store, place) for place in range(TASKS)))
    print(json.dumps(counts))


async def list_figures(dsn: str) -> list[Figure]:
    async with PostgresStore(dsn, schema="few") as few, PostgresStore(dsn, schema="many") as many:
        for store, schema, count in ((few, "few", FEW), (many, "many", MANY)):
            async with beside(dsn, schema) as connection:
                await connection.execute(_GENERATE, (count,))
                await connection.execute("ANALYZE")
            for _ in range(60):
                session = new_session(definition=AGENT, owner="owner 7")
                await store.save((await store.create(session)).suspended())
        short, long = await interleaved(
            lambda: few.list(owner="owner 7", status="suspended"),
            lambda: many.list(owner="owner 7", status="suspended"),
            rounds=100,
        )
    detail = f"at {FEW:,}: {ms(short)}, at {MANY:,}: {ms(long)}"
    return [Figure("newest page by owner and status, at 1,000,000 over 1,000", long / short, 2, detail=detail)]


_GENERATE = """
    INSERT INTO session (id, log, version, status, agent, owner, created, updated, op)
    SELECT 's' || n, n, 1, CASE WHEN n %% 7 = 0 THEN 'suspended' ELSE 'active' END, 'agent ' || n %% 10,
        'owner ' || n %% 100, n, n, ''
    FROM generate_series(1, %s) AS n
"""


async def search_figures(dsn: str) -> list[Figure]:
    """What searches cost, once all is indexed and the server has looked at how often words are."""
    draw = random.Random(1)
    async with PostgresStore(dsn, schema="searches") as store, beside(dsn, "searches") as connection:
        for start in range(0, SEARCHED, 1_000):
            said = [_words(draw, number) for number in range(start, start + 1_000)]
            last = await store.create(new_session(*said, definition=AGENT, owner=f"owner {start // 1_000 % 10}"))
        start_of_index = time.perf_counter()
        await store.search("needle")
        built = f"{SEARCHED:,} messages, indexed in {time.perf_counter() - start_of_index:.0f} s"
        await connection.execute("ANALYZE word")
        queries: dict[str, tuple[str, dict[str, Any]]] = {
            "one word in 10,000 messages": ("needle", {}),
            "that word and one in all messages": ("needle common", {}),
            "a phrase in 10,000 messages": ('"needle common"', {}),
            "a word that begins so, in 10,000 messages": ("need*", {}),
            "a word in all messages, the newest 10,000 ranked": ("common", {}),
            "a word in all messages, in one session": ("common", {"session_id": last.id}),
            "one word in 10,000 messages, of which an owner has a tenth": ("needle", {"owner": "owner 3"}),
        }
        figures = []
        for name, (query, options) in queries.items():
            (median,) = await interleaved(partial(store.search, query, **options), rounds=15)
            figures.append(Figure(f"search: {name}", median * 1000, 50, unit="ms", detail=built))
    return figures


def _words(draw: random.Random, number: int) -> str:
    """Ordinary words, some of them very common; and now and then a needle."""
    words = [f"word{int(20_000 ** draw.random())}" for _ in range(12)]
    return " ".join((*words, *(["needle"] if number % (SEARCHED // 10_000) == 0 else []), "common"))


PARTS = (save_figures, rate_figures, crowd_figures, list_figures, search_figures)


async def figures() -> list[Figure]:
    found: list[Figure] = []
    for part in PARTS:
        home = Path(tempfile.mkdtemp(prefix="perdure-bench-"))
        given = os.environ.get(postgres_server.GIVEN)
        server = None if given else postgres_server.start(home / "data")
        try:
            found += await part(given or server.get_uri())  # type: ignore[union-attr]
        finally:
            if server is not None:
                server.cleanup()
            shutil.rmtree(home, ignore_errors=True)
    return found


if __name__ == "__main__":
    asyncio.run(_one_process(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
