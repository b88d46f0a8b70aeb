"""A check of a SQLite store's search index against the store: it may lag behind, but what it claims must be true."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apsw

from perdure.protocols import Problem
from perdure.stores.sqlite.schema import first_row, rows_of, search_path
from perdure.stores.sqlite.search import has_sums, is_index
from perdure.stores.sqlite.sums import connect_with_sums

_WHERE = "the search index"


def check_index(db: apsw.Connection, main: Path) -> Iterator[Problem]:
    """Yield what is wrong with the index of a store, if there is one. An interrupted write is rolled back first."""
    path = search_path(main)
    if not path.exists():
        return
    for what in _faults(db, path):
        repair = f"Stop all searches, and delete the file {path.name}: the next search rebuilds it from the store."
        yield Problem(None, _WHERE, what, repair)


def _faults(db: apsw.Connection, path: Path) -> Iterator[str]:
    # Not read-only: the next connection to open the file has to roll back a write that was cut short.
    index = connect_with_sums(path, has_sums)
    try:
        index.set_busy_timeout(10_000)
        index.pragma("query_only", 1)
        if not is_index(index):
            return  # empty, or of another release: the next search makes it again
        yield from (f"SQLite finds it damaged: {line}" for (line,) in _damage(index))
        index.execute("BEGIN")
        yield from _disagreements(db, index)
    except apsw.IOError:  # the disk failed: this is not damage of the index
        raise
    except apsw.Error as error:
        yield f"it cannot be read: {error}"
    finally:
        index.close()


def _damage(index: apsw.Connection) -> Iterator[tuple[str]]:
    return (row for row in rows_of(index, "PRAGMA integrity_check(5)", ()) if row != ("ok",))


def _disagreements(db: apsw.Connection, index: apsw.Connection) -> Iterator[str]:
    noted = dict(rows_of(index, "SELECT key, value FROM note", ()))
    uid, erasures, newest = first_row(
        db,
        "SELECT (SELECT value FROM meta WHERE key = 'uid'), (SELECT value FROM meta WHERE key = 'erasures'),"
        " (SELECT coalesce(max(rowid), 0) FROM msg)",
    )
    if (noted.get("uid"), noted.get("erasures")) != (uid, erasures):
        return  # another store's, or behind an erasure: the next search sees that too, and makes it again
    cursor = noted.get("cursor")
    if not isinstance(cursor, int) or cursor > newest:
        yield f"it claims to have read up to message {cursor}, and the store has {newest}"
        return
    yield from _misplaced(db, index, cursor)
    lacking = "SELECT 1 FROM place LEFT JOIN message_docsize USING (id) WHERE message_docsize.id IS NULL LIMIT 1"
    beyond = "SELECT 1 FROM message_docsize LEFT JOIN place USING (id) WHERE place.id IS NULL LIMIT 1"
    if first_row(index, lacking) or first_row(index, beyond):
        yield "its words and its places are not of the same messages"


_MESSAGES = """
    SELECT msg.rowid, msg.log, session.sid IS NOT NULL, session.owner
    FROM msg LEFT JOIN log ON log.log = msg.log LEFT JOIN session ON session.sid = log.sid
    WHERE msg.rowid <= ? ORDER BY msg.rowid
"""


def _misplaced(db: apsw.Connection, index: apsw.Connection, cursor: int) -> Iterator[str]:
    """Compare both sides in order, row by row, so that neither is ever in memory as a whole."""
    places = index.execute("SELECT id, log, owner FROM place ORDER BY id")
    place: Any = next(places, None)
    for rowid, log, is_owned, owner in db.execute(_MESSAGES, (cursor,)):
        if place is None or place[0] > rowid:
            yield "it lacks messages that it claims to have read"
            return
        if place[0] < rowid:
            break
        # The remains of an erased session may have had another owner when they were indexed.
        if place[1] != log or (is_owned and place[2] != owner):
            yield f"it places message {rowid} in another log, or with another owner"
            return
        place = next(places, None)
    if place is not None:
        yield "it holds messages that the store does not have"
