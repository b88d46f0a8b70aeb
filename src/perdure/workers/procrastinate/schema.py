"""procrastinate's tables in perdure's schema, and the triggers that tie them to sessions: made, and upgraded."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psycopg
from procrastinate.schema import SchemaManager

from perdure.errors import ConfigurationError, StoreError
from perdure.workers.procrastinate.database import Connection, Database, queue_of

NUMBER = 1
"""The number of jobs.sql. Raise it with each change there."""
_LOCK = 0x70657266  # the first half of the lock's key; the second is a hash of the schema's name
# From the catalog itself: `to_regclass` may answer with what this connection knew before it waited.
_IS_THERE = (
    "SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
    " WHERE nspname = %s AND relname = 'perdure_dispatcher'"
)
_NOTED = "SELECT procrastinate, number FROM perdure_dispatcher"
# One row. `per_owner` is how many sessions of an owner workers run at once; `swept` is when one of them last swept.
_TABLE = """
    CREATE TABLE perdure_dispatcher (
        procrastinate text COLLATE "C" NOT NULL,
        number        integer NOT NULL,
        queue         text NOT NULL,
        per_owner     integer,
        swept         timestamp with time zone NOT NULL DEFAULT '-infinity'
    ) WITH (fillfactor = 50)
"""


class Noted(NamedTuple):
    """The state of a schema: procrastinate's last migration, and the number of jobs.sql."""

    procrastinate: str
    number: int


async def prepare(database: Database) -> None:
    """Bring a schema up to date for the installed procrastinate and this release. Several processes may do so."""

    async def once() -> None:
        async with await database.connect() as connection:
            # Processes that start up at the same time wait for each other here, however long it takes.
            await connection.execute("SET lock_timeout = 0")
            while not await _is_done(connection, database.schema):
                async with connection.transaction():
                    await connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK, database.schema))
                    await _take_a_step(connection, database.schema)

    try:
        await database.patiently(once)
    except _Occupied:
        raise ConfigurationError(
            f"The schema {database.schema!r} has tables of procrastinate that perdure has not made. "
            "Give perdure a schema of its own: PostgresStore(dsn, schema=…)."
        ) from None


class _Occupied(Exception):
    """The schema has tables of procrastinate that perdure has not made."""


async def _is_done(connection: Connection, schema: str) -> bool:
    noted = await _noted(connection, schema)
    if noted is None:
        return False
    newest = migrations()[-1].stem
    if noted.procrastinate > newest:
        raise ConfigurationError(
            f"The schema {schema!r} was upgraded by a newer procrastinate ({noted.procrastinate}; this one knows "
            f"{newest}). Upgrade it: pip install --upgrade 'perdure[workers]'."
        )
    if noted.number > NUMBER:
        raise StoreError(
            f"The dispatcher in schema {schema!r} has number {noted.number}; this release knows up to {NUMBER}. "
            "Upgrade perdure."
        )
    return noted == (newest, NUMBER)


async def _take_a_step(connection: Connection, schema: str) -> None:
    """Apply the next missing step. Each of procrastinate's migrations gets a transaction of its own, as it expects."""
    noted = await _noted(connection, schema)  # under the lock: another process may have done this step
    scripts = migrations()
    if noted is None:
        await _create(connection, schema, scripts[-1].stem)
        return
    newer = [script for script in scripts if script.stem > noted.procrastinate]
    if newer:
        # Never prepared: a script has several statements, and PostgreSQL prepares only one.
        await connection.execute(newer[0].read_bytes(), prepare=False)
        await connection.execute("UPDATE perdure_dispatcher SET procrastinate = %s", (newer[0].stem,))
    elif noted.number < NUMBER:
        await connection.execute((Path(__file__).parent / "jobs.sql").read_bytes(), prepare=False)
        await connection.execute("UPDATE perdure_dispatcher SET number = %s", (NUMBER,))


async def _create(connection: Connection, schema: str, newest: str) -> None:
    await connection.execute(_TABLE)
    # Number 0: jobs.sql is the next step, in the same way as an upgrade.
    values = (newest, queue_of(schema))
    await connection.execute("INSERT INTO perdure_dispatcher (procrastinate, number, queue) VALUES (%s, 0, %s)", values)
    try:
        await connection.execute(SchemaManager.get_schema().encode(), prepare=False)
    except (psycopg.errors.DuplicateObject, psycopg.errors.DuplicateTable):
        raise _Occupied from None


async def _noted(connection: Connection, schema: str) -> Noted | None:
    if await (await connection.execute(_IS_THERE, (schema,))).fetchone() is None:
        return None
    row = await (await connection.execute(_NOTED)).fetchone()
    return None if row is None else Noted(*row)


def migrations() -> list[Path]:
    """Return procrastinate's migrations. The order of their names is the order in which they are applied."""
    return sorted(Path(SchemaManager.get_migrations_path()).glob("*.sql"))
