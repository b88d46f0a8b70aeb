"""Readers of other libraries' files: SQLite, JSON and lines of JSON. Files may be damaged, and are never changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw

from perdure.errors import InvalidData, StoreError

_MEND = "Mend or remove it and import again; what has arrived is kept"
ROW = "#"
"""The key of a row's number."""
_WAL, _AT = 2, 18
"""The byte, and its place in the header, of a SQLite file that is written by way of a log beside it."""


class Database:
    """A SQLite file of another library. Each row is read as a dict, with its number under ROW."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._told():
            # Not the standard library's sqlite3: two copies of SQLite that have a file open drop each other's locks.
            self._db = apsw.Connection(_address(path), flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
            # The program that owns the file may be writing to it.
            self._db.set_busy_timeout(5_000)

    def table(self, *columns: str) -> str | None:
        """Return the name of the first table that has these columns, or None if there is none."""
        return next((name for name in self._tables() if set(columns) <= self.columns(name)), None)

    def columns(self, table: str) -> set[str]:
        with self._told():
            return {str(row[1]) for row in self._db.execute(f"PRAGMA table_info({_quoted(table)})")}

    def require(self, what: str, *columns: str) -> str:
        """Return the name of the first table that has these columns. Raise InvalidData if there is none."""
        found = self.table(*columns)
        if found is None:
            problem = f"{self.path} is not a database of {what}: no table has the columns {', '.join(columns)}"
            raise InvalidData("$.source", problem)
        return found

    def rows(
        self, table: str, order: str = "rowid", *, columns: Sequence[str] = (), **where: Any
    ) -> Iterator[dict[str, Any]]:
        """Yield the rows of a table that have these values, with all columns or with some."""
        asked = " AND ".join(f"{_quoted(name)} = ?" for name in where) or "1"
        shown = ", ".join(map(_quoted, columns)) or "*"
        text = f"SELECT rowid AS {_quoted(ROW)}, {shown} FROM {_quoted(table)} WHERE {asked} ORDER BY {order}"
        with self._told():
            cursor = self._db.execute(text, tuple(where.values()))
            for row in cursor:
                yield dict(zip((name for name, *_ in cursor.get_description()), row, strict=True))

    def close(self) -> None:
        self._db.close()

    def _tables(self) -> list[str]:
        with self._told():
            return [str(name) for (name,) in self._db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, UnicodeDecodeError) as error:
            advice = "Open it with the library that wrote it, then import again; what has arrived is kept."
            raise StoreError(f"{self.path} cannot be read ({error}).", advice) from error


def _address(path: Path) -> str:
    """Return the address that opens a file without writing anything to it or beside it."""
    if not path.is_file():
        raise StoreError(f"{path} is not a file.", "Name the file that the library has written.")
    with path.open("rb") as file:
        header = file.read(_AT + 1)
    has_log = path.with_name(f"{path.name}-wal").exists()
    # A reader of such a file would create a log if there is none. Without a log, the file is complete.
    frozen = "&immutable=1" if header[_AT:] == bytes([_WAL]) and not has_log else ""
    return f"file:{quote(str(path.absolute()))}?mode=ro{frozen}"


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def read_json(raw: Any, where: str) -> Any:
    """Return the JSON in a text or in bytes. Raise InvalidData that names the place if it is not JSON."""
    try:
        return json.loads(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidData(where, f"this is not JSON: {error}. {_MEND}") from None


def read_object(raw: Any, where: str) -> dict[str, Any]:
    """Return a JSON object, which may be given as a text."""
    found = read_json(raw, where) if isinstance(raw, str | bytes) else raw
    if not isinstance(found, dict):
        raise InvalidData(where, f"this is not a JSON object. {_MEND}")
    return found


def read_text(value: Any, where: str) -> str:
    """Return a text. Raise InvalidData that names the place if the value is not one."""
    if not isinstance(value, str):
        raise InvalidData(where, f"a text is missing here. {_MEND}")
    return value


def read_time(value: Any) -> datetime | None:
    """Return the time in a column that has a number of seconds or a text, or None if it is not a time."""
    try:
        if isinstance(value, int | float):
            return datetime.fromtimestamp(value, UTC)
        found = datetime.fromisoformat(value)
    except (ValueError, TypeError, OverflowError, OSError):
        return None
    # SQLite writes its own times in UTC without saying so.
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a file, one on each line. A last line that was cut short is left out."""
    lines: Sequence[bytes] = read_bytes(path).split(b"\n")
    found: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(read_object(line, f"{path}:{number}"))
        except InvalidData:
            if number == len(lines):  # its writer has not finished it yet, or was killed
                break
            raise
    return found


def read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}.", "Check its permissions and the disk.") from error
