"""Rows of PostgreSQL that rot: one value of one row is changed, as a flipped bit would change it."""

from __future__ import annotations

import random
import struct
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import sql
from tests.stores.rotting import UNPROTECTED

from perdure.testing.rot.attack import Hurt

NAMING = frozenset(
    {"sid", "id", "name", "hash", "run", "loop", "digest", "child", "tag", "key", "log", "version", "seq"}
)
"""Columns that name a row: changed, it is another row, and the one that was there is missing."""
DERIVED = frozenset({"words", "seal", "name_hash"})


class RottenRows:
    """The rows of a schema. Triggers and checks do not see the change, just as they do not see damage on a disk."""

    def __init__(self, dsn: str, schema: str, *, naming: bool = False) -> None:
        self._db = psycopg.connect(dsn, autocommit=True)
        self._db.execute("SET session_replication_role = replica")
        self._schema = schema
        for table in ("key", "log"):  # otherwise the database would make a new seal for the damaged row
            name = sql.Identifier(schema, table)
            self._db.execute(sql.SQL("ALTER TABLE {} ALTER COLUMN seal DROP EXPRESSION").format(name))
        self._columns = self._db.execute(
            "SELECT table_name, column_name, udt_name FROM information_schema.columns"
            " WHERE table_schema = %s AND is_generated = 'NEVER' AND is_identity = 'NO'",
            (schema,),
        ).fetchall()
        named = {table for table, _, _ in self._columns}
        self._sound = {
            table: self._rows(table) for table in sorted(named) if not table.startswith(("perdure_", "procr"))
        }
        self._columns = [
            each
            for each in self._columns
            if (each[1] in NAMING) == naming
            and self._sound.get(each[0])
            and each[1] not in UNPROTECTED.get(each[0], ())
            and each[1] not in DERIVED
            and each[2] in _CHANGED
        ]
        self._undo: list[tuple[str, str, Any, str]] = []

    def _rows(self, table: str) -> list[str]:
        found = self._db.execute(sql.SQL("SELECT ctid::text FROM {}").format(sql.Identifier(self._schema, table)))
        return [row[0] for row in found.fetchall()]

    async def hurt(self, rng: random.Random) -> Hurt | None:
        table, column, kind = rng.choice(self._columns)
        name, field = sql.Identifier(self._schema, table), sql.Identifier(column)
        rows = self._rows(table)
        if not rows:
            return None
        at = rng.choice(rows)
        (value,) = self._db.execute(
            sql.SQL("SELECT {} FROM {} WHERE ctid = %s::tid").format(field, name), (at,)
        ).fetchone() or (None,)
        if value is None or value in ("", b""):
            return None
        changed = _CHANGED[kind](value, rng)
        if changed is None or changed == value:
            return None
        update = sql.SQL("UPDATE {} SET {} = %s WHERE ctid = %s::tid RETURNING ctid::text").format(name, field)
        with suppress(psycopg.Error):  # a value that the column cannot have, or that another row has
            ((now,),) = self._db.execute(update, (changed, at)).fetchall()
            self._undo.append((table, column, value, now))
            return Hurt(f"{table}.{column} of row {at}: {value!r} is {changed!r}"[:160])
        return None

    async def heal(self) -> None:
        for table, column, value, at in reversed(self._undo):
            update = sql.SQL("UPDATE {} SET {} = %s WHERE ctid = %s::tid").format(
                sql.Identifier(self._schema, table), sql.Identifier(column)
            )
            self._db.execute(update, (value, at))
        self._undo.clear()

    def close(self) -> None:
        self._db.close()


def _bytes(value: bytes, rng: random.Random) -> bytes:
    raw = bytearray(value)
    raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def _text(value: str, rng: random.Random) -> str | None:
    with suppress(UnicodeDecodeError):
        changed = _bytes(value.encode(), rng).decode()
        return None if "\0" in changed else changed
    return None


def _number(bits: int) -> Any:
    return lambda value, rng: int.from_bytes(
        (value & (2**bits - 1) ^ 1 << rng.randrange(bits)).to_bytes(bits // 8, "big"), "big", signed=True
    )


def _double(value: float, rng: random.Random) -> float:
    (found,) = struct.unpack(">d", _bytes(struct.pack(">d", value), rng))
    return float(found)


_CHANGED: dict[str, Any] = {
    "bytea": _bytes,
    "text": _text,
    "int8": _number(64),
    "int4": _number(32),
    "int2": _number(16),
    "float8": _double,
    "bool": lambda value, rng: not value,
}
