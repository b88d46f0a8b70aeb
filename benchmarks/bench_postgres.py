"""PostgresStore on a real server: a save beside one bare statement, alone and with 64 sessions at once.

The server is the one that PERDURE_TEST_POSTGRES names, or one from a wheel, with its own defaults: it does sync.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from typing import Any

import msgspec
import psycopg
from psycopg_pool import AsyncConnectionPool
from tests import postgres_server

from benchmarks.harness import Run, interleaved, ms, rates
from benchmarks.setting import AGENT, Saver, filled, turn
from perdure import PostgresStore, SessionRuntime

TASKS, POOL = 64, 16
_OPS = count(1)
_SAVE = """
    WITH moved AS (
        UPDATE session SET version = version + 1, updated = extract(epoch FROM now()), msg_end = msg_end + 4, op = %s
        WHERE id = %s RETURNING sid, log, version, msg_end
    ),
    said AS (
        INSERT INTO msg (log, pos, crc, body)
        SELECT log, msg_end - 5 + n, crc, body
        FROM moved CROSS JOIN unnest(%b::bigint[], %b::bytea[]) WITH ORDINALITY AS given (crc, body, n)
    )
    INSERT INTO head (sid, version, crc, op, hashes, wanted, body) SELECT sid, version, 0, '', '{}', '{}', %b FROM moved
"""


@contextmanager
def server(run: Run) -> Iterator[str]:
    """Start a server and stop it, unless one is given."""
    given = os.environ.get(postgres_server.GIVEN)
    if given:
        yield given
        return
    with run.folder() as home:
        started = postgres_server.start(home / "data")
        try:
            yield started.get_uri()
        finally:
            started.cleanup()


def options(schema: str) -> dict[str, Any]:
    return {"autocommit": True, "prepare_threshold": 0, "options": f"-c search_path={schema}"}


@asynccontextmanager
async def schema_of(dsn: str, schema: str) -> AsyncIterator[PostgresStore]:
    """Open a store in a schema of its own, which is dropped afterwards."""
    try:
        async with PostgresStore(dsn, schema=schema) as store:
            yield store
    finally:
        postgres_server.drop(dsn, [schema])


def bare_turn(session_id: str, head: bytes) -> tuple[Any, ...]:
    """Return the parameters of the bare statement. They are encoded for each call, as a save must do."""
    rows = [msgspec.json.encode(message) for message in turn()]
    return (f"bare-{next(_OPS)}", session_id, [zlib.crc32(row) for row in rows], rows, head)


async def head_of(connection: psycopg.AsyncConnection[Any]) -> bytes:
    found = await connection.execute("SELECT body FROM head ORDER BY version DESC LIMIT 1")
    row = await found.fetchone()
    assert row is not None
    return bytes(row[0])


async def measure(run: Run) -> None:
    with server(run) as dsn:
        await alone(run, dsn)
        await crowd(run, dsn)


async def alone(run: Run, dsn: str) -> None:
    async with (
        schema_of(dsn, "bench_saves") as store,
        await psycopg.AsyncConnection.connect(dsn, **options("bench_saves")) as connection,
    ):
        runtime = SessionRuntime(store)
        savers = [Saver(store, await filled(runtime, count)) for count in (0, 100_000)]
        await savers[0]()
        bare_id, head = (await runtime.create(AGENT)).id, await head_of(connection)

        async def bare() -> None:
            await connection.execute(_SAVE, bare_turn(bare_id, head))

        empty, many, floor = await interleaved(*savers, bare, rounds=300, warm_up=20)
    cpu = f"processor of the client {ms(empty.cpu)} / {ms(floor.cpu)}"
    run.report("postgres.bare", empty.wall / floor.wall, f"{ms(empty.wall)} / {ms(floor.wall)}; {cpu}")
    run.report("postgres.100k", many.wall / empty.wall, f"{ms(many.wall)} / {ms(empty.wall)}")


async def crowd(run: Run, dsn: str) -> None:
    async with (
        schema_of(dsn, "bench_rates") as store,
        AsyncConnectionPool(dsn, min_size=POOL, max_size=POOL, kwargs=options("bench_rates"), open=False) as pool,
    ):
        runtime = SessionRuntime(store)
        savers = [Saver(store, await runtime.create(AGENT)) for _ in range(TASKS)]
        bare_ids = [(await runtime.create(AGENT)).id for _ in range(TASKS)]
        await savers[0]()
        async with pool.connection() as connection:
            head = await head_of(connection)

        async def bare(number: int) -> None:
            async with pool.connection() as connection:
                await connection.execute(_SAVE, bare_turn(bare_ids[number], head))

        ours, floor = await rates(lambda number: savers[number](), bare, tasks=TASKS)
    detail = f"{ours.a_second:,.0f} / {floor.a_second:,.0f} a second; {ms(ours.cpu)} of the client's processor a turn"
    run.report("postgres.crowd", ours.a_second / floor.a_second, detail)
