"""Jobs over sealed tables: rows are sealed on their way to an engine, and opened on their way back.

A job does not know about it. A statement of the same transaction looks up the owner of a row, unless it is known.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from perdure.errors import CorruptRecord, InvalidData, KeyUnavailable
from perdure.protocols import Key
from perdure.stores.engine import Delete, Insert, Job, Row, Select, Statement, T, Update, Where
from perdure.stores.sealing import NAMED, WITH_CRC, Root, Sealing, StoredName, is_sealed, key_of, plain_name

_BODIES = WITH_CRC | NAMED
_WITH_FILES = frozenset({"blob", "attached"})
_HASH = re.compile("[0-9a-f]{64}")
_TRANSLATED = _BODIES | _WITH_FILES | {"key"}


class Owner:
    """An owner that is known: a class of its own, since None is an owner too."""

    __slots__ = ("name",)

    def __init__(self, name: str | None) -> None:
        self.name = name


def translated(job: Job[T], sealing: Sealing, owner: Owner | None = None) -> Job[T]:
    """Drive a job over tables that may be sealed. With `owner`, all rows that it writes belong to that owner."""
    translation = _Translation(sealing, owner)
    answer = translation.answer if sealing.is_on else translation.checked
    try:
        statement = next(job)
        while True:
            try:
                rows = yield from answer(statement)
            except (CorruptRecord, KeyUnavailable) as error:
                statement = job.throw(error)
            else:
                statement = job.send(rows)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here
    finally:
        job.close()


class _Translation:
    """The translation of one job's statements, with the owners of rows that were found so far."""

    def __init__(self, sealing: Sealing, owner: Owner | None) -> None:
        self._sealing = sealing
        self._fixed = owner
        self._of_sid: dict[int, Owner | None] = {}
        self._of_log: dict[int | str, Owner | None] = {}
        self._session_id: str | None = None
        self._seen: dict[str | None, None] = {}

    def checked(self, statement: Statement) -> Job[list[Any]]:
        """Answer a statement of a store without keys, which may have sealed rows."""
        self._note(statement)
        rows = yield statement
        if type(statement) is Select and statement.table in _BODIES and "body" in statement.columns:
            at = statement.columns.index("body")
            if any(is_sealed(row[at]) for row in rows):
                return self._opened(statement, rows)
        return rows

    def answer(self, statement: Statement) -> Job[list[Any]]:
        self._note(statement)
        if getattr(statement, "table", None) not in _TRANSLATED:
            return (yield statement)
        statement = _with_bare_names(statement)
        match statement:
            case Select(table="key"):
                return (yield from self._keys(statement))
            case Select():
                return (yield from self._select(statement))
            case Insert():
                return (yield (yield from self._sealed(statement)))
            case Update() if "body" in statement.values:
                return (yield (yield from self._changed(statement)))
            case Delete(table="attached") if "log" in statement.where and _is_plain(statement.where):
                return (yield from self._detach(statement))
        return (yield statement)

    def _note(self, statement: Statement) -> None:
        """Note which session a job is about, to name it in errors."""
        if type(statement) is Select and statement.table == "session" and isinstance(statement.where.get("id"), str):
            self._session_id = str(statement.where["id"])

    def _select(self, asked: Select) -> Job[list[Any]]:
        if asked.table in _WITH_FILES and _is_plain(asked.where):
            return (yield from self._select_file(asked))
        # The tag covers the name: without it, the body cannot be opened.
        if asked.table == "value" and "body" in asked.columns and "hash" not in {*asked.columns, *asked.where}:
            rows = yield replace(asked, columns=(*asked.columns, "hash"))
            return [row[:-1] for row in self._opened(replace(asked, columns=(*asked.columns, "hash")), rows)]
        rows = yield asked
        if asked.table in _WITH_FILES and "hash" in asked.columns:
            at = asked.columns.index("hash")
            rows = [(*row[:at], self._file_name(row[at]), *row[at + 1 :]) for row in rows]
        return self._opened(asked, rows)

    def _opened(self, asked: Select, rows: list[Any]) -> list[Any]:
        columns, table = asked.columns, asked.table
        if table not in _BODIES or "body" not in columns:
            return rows
        if columns[-2:] == ("crc", "body") and not asked.lenient:
            try:
                return self._sealing.opened_rows(table, rows)
            except KeyUnavailable as error:
                raise error.of_session(self._session_id) from None
        body_at, crc_at = columns.index("body"), columns.index("crc") if "crc" in columns else None
        name_at = columns.index("hash") if table in NAMED and "hash" in columns else None
        given = str(asked.where.get("hash", "")) if table in NAMED else ""
        found = []
        for row in rows:
            name = given if name_at is None else str(row[name_at])
            try:
                body, crc = self._sealing.opened(table, row[body_at], None if crc_at is None else row[crc_at], name)
            except KeyUnavailable as error:
                if not asked.lenient:
                    raise error.of_session(self._session_id) from None
                body, crc = row[body_at], -1
            columns_of_row = list(row)
            columns_of_row[body_at] = body
            if crc_at is not None:
                columns_of_row[crc_at] = crc
            found.append(tuple(columns_of_row))
        return found

    def _file_name(self, stored: Any) -> Any:
        if type(stored) is not str:
            return stored
        try:
            return self._sealing.file_name(stored)
        except (KeyUnavailable, InvalidData):  # the row can still be erased by this name
            return stored

    def _select_file(self, asked: Select) -> Job[list[Any]]:
        """Look for a file by the hash that messages use for it."""
        plain = asked.where["hash"]
        rest = {key: value for key, value in asked.where.items() if key != "hash"}
        columns = (*asked.columns, "hash")
        if asked.table == "attached" and "log" in rest:
            # A message has few files. Their names are opened and compared here, so the limit comes afterwards.
            rows = yield replace(asked, columns=columns, where=rest, limit=None)
            found = [row[:-1] for row in rows if plain_name(self._file_name(row[-1])) == plain]
            return found if asked.limit is None else found[: asked.limit]
        name = yield from self._stored_name(plain) if asked.table == "blob" else _unchanged(plain)
        rows = yield replace(asked, columns=columns, where={**rest, "hash": str(name)})
        return [row[:-1] for row in self._opened(replace(asked, columns=columns), rows)]

    def _stored_name(self, plain: str) -> Job[str]:
        """Return the name that a file is stored under: its plain hash, or a name made with some owner's key."""
        if self._session_id is not None:
            for (owner,) in (yield Select("session", ("owner",), {"id": self._session_id})):
                self._seen[owner] = None
        near = [root for owner in self._seen if (root := self._sealing.known_root(owner)) is not None]
        # The likely owners first: there may be thousands of others.
        for candidates in ([plain, *_names(near, plain)], _names(self._sealing.roots(), plain)):
            rows = yield Select("blob", ("hash",), {"hash in": [str(each) for each in candidates]}, limit=1)
            if rows:
                return str(rows[0][0])
        return plain

    def _sealed(self, given: Insert) -> Job[Insert]:
        """Return new rows as the table keeps them."""
        table, columns = given.table, given.columns
        rows = [*given.rows]
        sealed: list[Row] = []
        for row in rows:
            if table == "key":
                sealed.append((yield from self._sealed_key(columns, row)))
            elif table == "attached":
                sealed.append((yield from self._noted_file(columns, row)))
            else:
                owner = yield from self._owner(dict(zip(columns, row, strict=True)), given.whose)
                sealed.append(self._sealed_row(table, columns, row, owner.name if owner else None))
        return replace(given, rows=sealed)

    def _sealed_row(self, table: str, columns: Sequence[str], row: Row, owner: str | None) -> Row:
        found = dict(zip(columns, row, strict=True))
        # A file may have any bytes, and so look like a sealed body.
        if is_sealed(found["body"]) and table != "blob":
            return row
        if table == "blob":
            found["hash"] = str(self._sealing.root(owner).file_name(found["hash"]))
        if table in NAMED:
            found["body"] = self._sealing.seal(table, owner, found["body"], name=found["hash"])
        else:
            found["crc"], found["body"] = self._sealing.sealed_row(table, owner, found["crc"], found["body"])
        return tuple(found.values())

    def _sealed_key(self, columns: Sequence[str], row: Row) -> Job[Row]:
        found = dict(zip(columns, row, strict=True))
        owner = yield from self._owner(found, None)
        key = Key(found["name"], found["digest"])
        name, digest, crc = self._sealing.sealed_key(owner.name if owner else None, key, found["crc"])
        return tuple({**found, "name": name, "digest": digest, "crc": crc}.values())

    def _noted_file(self, columns: Sequence[str], row: Row) -> Job[Row]:
        """Return a row that says which message shows a file, with the name that the file is stored under."""
        found = dict(zip(columns, row, strict=True))
        if _is_plain(found):
            owner = yield from self._owner(found, None)
            name = str(self._sealing.root(owner.name if owner else None).file_name(found["hash"]))
            if not (yield Select("blob", ("hash",), {"hash": name})):
                self._seen[owner.name if owner else None] = None
                name = yield from self._stored_name(found["hash"])
            found["hash"] = name
        return tuple(found.values())

    def _changed(self, given: Update) -> Job[Update]:
        """Return an update with its new body sealed, as the table keeps it."""
        owner = yield from self._owner(given.where, None)
        key = b""
        if owner is None:  # its session is gone: the row keeps the key that it has
            rows = yield Select(given.table, ("body",), given.where, limit=1)
            key = key_of(rows[0][0]) if rows and is_sealed(rows[0][0]) else b""
        crc, body = given.values.get("crc"), given.values["body"]
        sealed = self._sealing.seal(given.table, owner.name if owner else None, body, crc or 0, key=key)
        return replace(given, values={**given.values, "crc": crc32(sealed), "body": sealed})

    def _detach(self, given: Delete) -> Job[list[Any]]:
        """Delete the note that a message shows a file, by the hash that messages use for it."""
        plain = given.where["hash"]
        rest = {key: value for key, value in given.where.items() if key != "hash"}
        for (name,) in (yield Select("attached", ("hash",), rest)):
            if plain_name(self._file_name(name)) == plain:
                yield Delete("attached", {**rest, "hash": name})
        return []

    def _keys(self, asked: Select) -> Job[list[Any]]:
        """Read idempotency keys: those that are sealed, and those that were written before the store had keys."""
        columns = tuple(dict.fromkeys((*asked.columns, "name", "digest", "crc")))
        wheres: list[Where] = [asked.where]
        if "name" in asked.where:
            owner = yield from self._owner(asked.where, None)
            root = self._sealing.known_root(owner.name if owner else None)
            if root is not None:
                wheres.insert(0, {**asked.where, "name": root.key_name(asked.where["name"])})
        found = []
        for where in wheres:
            for row in (yield replace(asked, columns=columns, where=where)):
                named = dict(zip(columns, row, strict=True))
                opened = self._sealing.opened_key(named["name"], named["digest"], named["crc"])
                named |= dict(zip(("name", "digest", "crc"), opened, strict=True))
                found.append(tuple(named[column] for column in asked.columns))
        return found

    def _owner(self, row: Where, whose: tuple[str, int | str] | None) -> Job[Owner | None]:
        """Return the owner of a row; None if its session is gone."""
        if self._fixed is not None:
            return self._fixed
        column, number = whose or next((name, row[name]) for name in ("sid", "log") if name in row)
        if column == "log":
            if number not in self._of_log:
                rows = yield Select("log", ("sid",), {"log": number})
                self._of_log[number] = (yield from self._owner_of(rows[0][0])) if rows else None
            return self._of_log[number]
        return (yield from self._owner_of(int(number)))

    def _owner_of(self, sid: int) -> Job[Owner | None]:
        if sid not in self._of_sid:
            rows = yield Select("session", ("owner",), {"sid": sid})
            self._of_sid[sid] = Owner(rows[0][0]) if rows else None
        return self._of_sid[sid]


def _is_plain(row: Where) -> bool:
    """Tell whether a row names a file by its plain hash, as messages do."""
    return type(row.get("hash")) is str and _HASH.fullmatch(row["hash"]) is not None


def _with_bare_names(statement: Statement) -> Statement:
    """Return a statement whose names of files are plain strings, as drivers bind them."""
    if not isinstance(statement, Select | Delete) or statement.table not in _WITH_FILES:
        return statement
    where = {key: str(value) if isinstance(value, StoredName) else value for key, value in statement.where.items()}
    return replace(statement, where=where)


def _names(roots: Sequence[Root], plain: str) -> list[str]:
    return [root.file_name(plain) for root in roots]


def _unchanged(name: str) -> Job[str]:
    return name
    yield  # makes it a generator, as the other branch of its caller is one
