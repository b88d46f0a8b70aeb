"""Bringing a schema of a PostgreSQL database up to date, once, even if several processes start at the same time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from perdure.errors import InvalidData, RestoreUnfinished, StoreError
from perdure.stores.format.heads import was_spawned
from perdure.stores.postgres.link import LIMITS, completed_dsn, limiting, passwords_in

RESTORING = "perdure_restoring"
"""The table that exists until a restore into its schema is finished."""
# The number of the advisory lock for migrations, "pere" in ASCII.
_LOCK = 0x70657265
_BEFORE_SPAWNED = 4
"""The number of the last schema without a mark for sub-agents' sessions."""
_ADD_SPAWNED = "ALTER TABLE session ADD COLUMN IF NOT EXISTS spawned smallint NOT NULL DEFAULT 0"
_HEADS = (
    "SELECT session.sid, head.body FROM session"
    " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
    " WHERE session.sid > %s ORDER BY session.sid LIMIT %s"
)
_TABLE = (
    "SELECT 1 FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace WHERE nspname = %s AND relname = %s"
)
_SESSIONS_AT_ONCE = 1_000
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")


def check_schema(name: str) -> str:
    """Return the name of a schema. Raise InvalidData if it is not a plain one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidData("$.schema", f"{name!r} is not a name for a schema; use letters, digits and _, 48 at most")
    return name


async def migrate(dsn: str, schema: str, *, restoring: bool = False) -> None:
    """Create the schema if it is missing, and apply the migrations that it lacks.

    Raise RestoreUnfinished if a restore into it is not finished, unless it is opened for that restore.
    """
    address, passwords = completed_dsn(dsn), passwords_in(dsn)
    # No limit for locks: other processes that start wait for the migration, however long it takes.
    limits = limiting(dsn, {name: limit for name, limit in LIMITS.items() if name != "lock_timeout"})
    try:
        async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
            await connection.execute("SET client_min_messages = warning")
            for limit in limits:
                await connection.execute(limit)
            await connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(schema)))
            if not restoring and await _is_restoring(connection, schema):
                raise RestoreUnfinished(f"the schema {schema!r}", f"the table {schema}.{RESTORING}, and the others")
            current, filled = await _current(connection, schema), 0
            if current == _BEFORE_SPAWNED:
                await connection.execute(_ADD_SPAWNED)
                filled = await _fill_in_spawned(connection, 0)
            if current != len(migrations()):
                async with connection.transaction():
                    await _apply(connection, schema, filled)
    except psycopg.Error as error:
        said = str(error)
        # libpq may quote a part of the DSN.
        for password in passwords:
            said = said.replace(password, "…")
        raise StoreError(
            f"The schema {schema!r} cannot be opened: {said}. Check the DSN and the role's rights."
        ) from None


async def _apply(connection: psycopg.AsyncConnection[Any], schema: str, filled: int) -> None:
    # A process that waited here finds the work done, so `_current` looks again.
    await connection.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", (_LOCK, schema))
    current = await _current(connection, schema)
    if current is None:
        await connection.execute(_created(schema))
        await connection.execute("CREATE TABLE perdure_schema (number integer NOT NULL)")
        await connection.execute("INSERT INTO perdure_schema VALUES (0)")
        current = 0
    for number, script in enumerate(migrations()[current:], current):
        if number == _BEFORE_SPAWNED:
            await connection.execute(_ADD_SPAWNED)
            await _fill_in_spawned(connection, filled)
        await connection.execute(script.encode())
    await connection.execute("UPDATE perdure_schema SET number = %s", (len(migrations()),))


async def _fill_in_spawned(connection: psycopg.AsyncConnection[Any], after: int) -> int:
    """Note which sessions after a number are sub-agents', as their heads say. Return the last number seen.

    In a large store this is done before the migration itself, some sessions at a time, while others read and write.
    """
    while rows := await (await connection.execute(_HEADS, (after, _SESSIONS_AT_ONCE))).fetchall():
        spawned = [sid for sid, body in rows if was_spawned(body)]
        await connection.execute("UPDATE session SET spawned = 1 WHERE sid = ANY (%s) AND spawned = 0", (spawned,))
        after = rows[-1][0]
    return after


def create_schema(connection: psycopg.Connection[Any], schema: str) -> None:
    """Create a schema if it is missing. This is for a connection of a thread."""
    connection.execute(_created(schema))


def _created(schema: str) -> sql.Composed:
    return sql.SQL("CREATE SCHEMA IF NOT EXISTS {}").format(sql.Identifier(schema))


async def _is_restoring(connection: psycopg.AsyncConnection[Any], schema: str) -> bool:
    return await (await connection.execute(_TABLE, (schema, RESTORING))).fetchone() is not None


async def _current(connection: psycopg.AsyncConnection[Any], schema: str) -> int | None:
    """Return the number of the schema; None if nothing is there. Raise StoreError if a newer release was here."""
    # The catalog itself is read: `to_regclass` may answer with what this connection knew before it waited.
    table = await connection.execute(_TABLE, (schema, "perdure_schema"))
    if await table.fetchone() is None:
        return None
    row = await (await connection.execute("SELECT number FROM perdure_schema")).fetchone()
    newest = len(migrations())
    if row is None or row[0] > newest:
        raise StoreError(
            f"The schema {schema!r} has number {row and row[0]}; this release knows up to {newest}. Upgrade perdure."
        )
    return int(row[0])


def migrations() -> list[str]:
    """Return the scripts in order. Their names begin with their numbers."""
    return [script.read_text() for script in sorted((Path(__file__).parent / "migrations").glob("*.sql"))]
