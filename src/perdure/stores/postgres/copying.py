"""A schema of a PostgreSQL database copied table by table in one snapshot, and put back in one transaction.

Rows are copied in the order of their keys, in the server's binary form. A chunk's end depends on the key of the row
there, not on the number of rows before it. So a row that is inserted or changed alters the chunks around it alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

import psycopg
from psycopg import sql

from perdure.aio import aside
from perdure.errors import StoreError, StoreNotEmpty
from perdure.stores.copies import CHUNK, Outline, Part
from perdure.stores.engine import TABLES
from perdure.stores.postgres.link import as_store_error, completed_dsn
from perdure.stores.postgres.rows import KEY_IS_SOUND, LOG_IS_SOUND
from perdure.stores.postgres.schema import RESTORING, create_schema, migrations

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit
    from perdure.stores.postgres.engine import PostgresEngine

# What the server's binary COPY format has before and behind all rows. A copy holds the rows alone.
_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_END = b"\xff\xff"
_LENGTH = struct.Struct(">i")
_MOST = 8 * CHUNK
# The number of the advisory lock for restores, "pers" in ASCII.
_LOCK = 0x70657273
_COUNTED = ("session", "head", "msg", "blob")
_OTHERS = frozenset({"perdure_schema", RESTORING})
_OWN = frozenset({*TABLES, "claimed", "word", "unindexed", "backdated", "waiting", *_OTHERS})

_FUNCTION = re.compile(r"CREATE (?:OR REPLACE )?FUNCTION (\w+)\(\)")

# Tables that refer to others come after them, since they are filled in this order.
_TABLES = """
    SELECT relname::text FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE nspname = current_schema() AND relkind = 'r' AND relname NOT LIKE 'procrastinate%'
    ORDER BY EXISTS (SELECT 1 FROM pg_constraint WHERE conrelid = pg_class.oid AND contype = 'f'), relname
"""
_COLUMNS = """
    SELECT attname::text, coalesce(array_position(indkey::int2[], attnum), 99), attidentity <> ''
    FROM pg_attribute LEFT JOIN pg_index ON indrelid = attrelid AND indisprimary
    WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
    ORDER BY 2, attnum
"""
_LAST_NUMBER = "SELECT pg_sequence_last_value(pg_get_serial_sequence(%s, %s)::regclass)"


class _Table(NamedTuple):
    name: str
    columns: Sequence[str]
    """The columns, those of the key first."""
    keys: int
    numbered: Sequence[str]

    @property
    def identifier(self) -> sql.Identifier:
        return sql.Identifier(self.name)

    @property
    def quoted(self) -> str:
        return f'"{self.name}"'

    @property
    def listed(self) -> sql.Composed:
        return sql.SQL(", ").join(map(sql.Identifier, self.columns))

    @classmethod
    def of(cls, connection: psycopg.Connection[Any], name: str) -> _Table:
        rows = connection.execute(_COLUMNS, (f'"{name}"',)).fetchall()
        keys = sum(place != 99 for _, place, _ in rows) or len(rows)
        return cls(name, [row[0] for row in rows], keys, [row[0] for row in rows if row[2]])


def copy_out(deposit: Deposit, connection: psycopg.Connection[Any]) -> Outline:
    """Put all tables into a deposit, as they are when the copy begins."""
    deposit.begin_again()
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        # Whole tables are read here. The connection's settings are for statements that look for one row.
        connection.execute("SET LOCAL enable_seqscan = on; SET LOCAL enable_bitmapscan = on")
        (store,) = _row(connection, "SELECT uid FROM meta")
        (schema,) = _row(connection, "SELECT number FROM perdure_schema")
        names = [name for (name,) in connection.execute(_TABLES).fetchall() if name not in _OTHERS]
        tables = [_Table.of(connection, name) for name in names]
        sizes = [_row(connection, "SELECT pg_table_size(%s::regclass)", table.quoted)[0] for table in tables]
        deposit.expect(sum(sizes))
        rows = {table.name: _copy_table(deposit, connection, table) for table in tables}
        return Outline(
            engine="postgres",
            store=str(store),
            schema=int(schema),
            counts={name: rows[name] for name in _COUNTED},
            facts={"numbers": dict(_numbers(connection, tables)), "unsound": list(_unsound(connection))},
        )


def _row(connection: psycopg.Connection[Any], query: str, *values: Any) -> Any:
    return connection.execute(query.encode(), values).fetchone()


def _numbers(connection: psycopg.Connection[Any], tables: Sequence[_Table]) -> Iterator[tuple[str, int]]:
    """Yield the last number given out, for each `table.column`."""
    for table in tables:
        for column in table.numbered:
            (last,) = _row(connection, _LAST_NUMBER, table.quoted, column)
            if last is not None:
                yield f"{table.name}.{column}", last


def _unsound(connection: psycopg.Connection[Any]) -> Iterator[str]:
    """Yield the rows whose seals do not match. A restore seals rows again, and would make these look sound."""
    for table, number, is_sound in (("key", "sid", KEY_IS_SOUND), ("log", "log", LOG_IS_SOUND)):
        query = f"SELECT {number}, name FROM {table} WHERE NOT ({is_sound}) LIMIT 20"
        for place, name in connection.execute(query.encode()).fetchall():
            yield f"{table} {place}/{name}"


def _copy_table(deposit: Deposit, connection: psycopg.Connection[Any], table: _Table) -> int:
    """Put a table's rows into a deposit, and return how many there are."""
    order = sql.SQL(", ").join(map(sql.Identifier, table.columns[: table.keys]))
    query = sql.SQL("COPY (SELECT {} FROM {} ORDER BY {}) TO STDOUT (FORMAT binary)")
    count, chunk = 0, bytearray()
    with connection.cursor() as cursor, cursor.copy(query.format(table.listed, table.identifier, order)) as rows:
        for data in rows:  # the server sends one row at a time
            row = bytes(data).removeprefix(_HEADER)
            if row in (b"", _END):
                continue
            count += 1
            chunk += row
            if len(chunk) >= _MOST or _ends_chunk(row, table.keys):
                deposit.put(table.name, bytes(chunk))
                chunk.clear()
    if chunk or not count:
        deposit.put(table.name, bytes(chunk))
    return count


def _ends_chunk(row: bytes, keys: int) -> bool:
    """Tell whether a chunk ends behind a row. That depends on the row's key, and is likelier for a long row."""
    # A row ends a chunk with the probability len(row) / CHUNK, so a chunk has about CHUNK bytes on average.
    return crc32(row[2 : _end_of_key(row, keys)]) * CHUNK < len(row) << 32


def _end_of_key(row: bytes, fields: int) -> int:
    at = 2  # behind the number of fields
    for _ in range(fields):
        at += 4 + max(_LENGTH.unpack_from(row, at)[0], 0)
    return at


class PostgresLanding:
    """A schema to restore a copy to. A table marks it as unfinished, and is dropped when the copy is complete."""

    def __init__(self, dsn: str, schema: str, made: Callable[[], PostgresEngine]) -> None:
        self._dsn = dsn
        self._schema = schema
        self._made = made
        self._connection: psycopg.Connection[Any] | None = None

    @property
    def engine(self) -> PostgresEngine:
        return self._made()

    async def begin(self) -> None:
        await self._aside(self._begin)

    async def take_in(self, outline: Outline, parts: Iterator[Part]) -> None:
        await self._aside(self._take_in, outline, parts)

    async def publish(self) -> None:
        await self._aside(lambda: self._opened.execute(sql.SQL("DROP TABLE {}").format(sql.Identifier(RESTORING))))

    async def end(self) -> None:
        if self._connection is not None:
            await aside(self._connection.close)

    async def _aside(self, step: Callable[..., Any], *given: Any) -> None:
        try:
            await aside(step, *given)
        except psycopg.Error as error:
            raise as_store_error(error) from None

    @property
    def _opened(self) -> psycopg.Connection[Any]:
        assert self._connection is not None, "it has begun"
        return self._connection

    def _begin(self) -> None:
        self._connection = connection = psycopg.Connection.connect(completed_dsn(self._dsn), autocommit=True)
        connection.execute("SET client_min_messages = warning")
        connection.execute(sql.SQL("SET search_path = {}").format(sql.Identifier(self._schema)))
        try:
            # Not zero: the server may not have noticed yet that an earlier restore was killed.
            connection.execute("SET lock_timeout = '20s'")
            _row(connection, "SELECT pg_advisory_lock(%s, hashtext(%s))", _LOCK, self._schema)
        except psycopg.errors.LockNotAvailable:
            what = f"Another process is restoring the schema {self._schema!r}."
            raise StoreError(what, "Wait until it is over.") from None
        with connection.transaction():
            self._clear(connection)
            create_schema(connection, self._schema)
            connection.execute(sql.SQL("CREATE TABLE {} ()").format(sql.Identifier(RESTORING)))

    def _clear(self, connection: psycopg.Connection[Any]) -> None:
        """Remove the tables of a store without sessions, or of a restore that was cut short."""
        tables = {name for (name,) in connection.execute(_TABLES).fetchall()}
        # Without these, a table of one of our names is another program's.
        is_ours = not tables.isdisjoint(_OTHERS)
        if others := sorted(tables - _OWN if is_ours else tables):
            raise StoreError(
                f"The schema {self._schema!r} has tables that are not perdure's: {', '.join(others[:5])}.",
                "Restore into another schema.",
            )
        if "session" in tables and RESTORING not in tables:
            (sessions,) = _row(connection, "SELECT count(*) FROM session")
            if sessions:
                raise StoreNotEmpty(f"The schema {self._schema!r}", sessions)
        for table in tables:
            connection.execute(sql.SQL("DROP TABLE {} CASCADE").format(sql.Identifier(table)))
        for name in _FUNCTION.findall("".join(migrations())) if is_ours else ():
            connection.execute(sql.SQL("DROP FUNCTION IF EXISTS {}() CASCADE").format(sql.Identifier(name)))

    def _take_in(self, outline: Outline, parts: Iterator[Part]) -> None:
        connection = self._opened
        if outline.schema > len(migrations()):
            known = len(migrations())
            raise StoreError(
                f"The backup has schema {outline.schema}; this release knows up to {known}. Upgrade perdure."
            )
        with connection.transaction():
            connection.execute("CREATE TABLE perdure_schema (number integer NOT NULL)")
            connection.execute("INSERT INTO perdure_schema VALUES (%s)", (outline.schema,))
            for script in migrations()[: outline.schema]:
                connection.execute(script.encode())
            connection.execute("DELETE FROM meta")
            for part in parts:
                self._fill(connection, part)
            self._number(connection, outline.facts["numbers"])
        # The planner has no statistics of the new rows yet, and autovacuum may be off.
        for (name,) in connection.execute(_TABLES).fetchall():
            connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(name)))

    def _fill(self, connection: psycopg.Connection[Any], part: Part) -> None:
        """Fill a table. Its triggers are off, since the rows that they have made were copied too."""
        table = _Table.of(connection, part.name)
        connection.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(table.identifier))
        query = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT binary)").format(table.identifier, table.listed)
        with connection.cursor() as cursor, cursor.copy(query) as rows:
            rows.write(_HEADER)
            for chunk in part.chunks:
                rows.write(chunk)
            rows.write(_END)
        connection.execute(sql.SQL("ALTER TABLE {} ENABLE TRIGGER USER").format(table.identifier))

    def _number(self, connection: psycopg.Connection[Any], numbers: Mapping[str, int]) -> None:
        for place, last in numbers.items():
            table, _, column = place.partition(".")
            _row(connection, "SELECT setval(pg_get_serial_sequence(%s, %s)::regclass, %s)", f'"{table}"', column, last)
