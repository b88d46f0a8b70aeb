"""Checks of a SQLite file below its rows: its pages, its schema, its counters and its search index."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import apsw

from perdure.protocols import Problem
from perdure.stores.sqlite.schema import first_row, migrate, rows_of
from perdure.stores.sqlite.search_check import check_index

_FILE = (
    "Stop all writers, keep a copy of the file, and restore it from a backup. An index alone is mended by "
    "`sqlite3 FILE REINDEX`; of a file with damaged pages `sqlite3 FILE .recover` saves what it can."
)
# SQLite's words, in its list of damage, for a page that it could not read.
_UNREAD = re.compile(r"unable to get the page\. error code=(\d+)")
_COPY = "Nothing that was said is touched by it. Copying the store into a new file makes it again."


def faults(db: apsw.Connection) -> list[Problem]:
    """Return all that is wrong. Each check runs by itself, since a damaged page stops the check that meets it.

    The search index comes first: read before the store, it can be behind the store, but never ahead of it.
    """
    looks = (_search, page_problems, missing_parts, meta_problems, tag_problems)
    return [problem for look in looks for problem in _surely(look, db)]


def _surely(look: Callable[[apsw.Connection], Iterator[Problem]], db: apsw.Connection) -> Iterator[Problem]:
    try:
        yield from look(db)
    except apsw.IOError:
        raise  # the disk failed, which says nothing about what is on it
    except (apsw.Error, UnicodeError) as error:
        yield Problem(None, "the database file", f"it cannot be read throughout: {error}", _FILE)


def _search(db: apsw.Connection) -> Iterator[Problem]:
    return check_index(db, Path(db.filename))


def page_problems(db: apsw.Connection) -> Iterator[Problem]:
    for (line,) in db.execute("PRAGMA integrity_check(20)"):
        # SQLite lists a failed read as damage. The low byte of an extended code is the primary one.
        unread = _UNREAD.search(line)
        if unread and int(unread[1]) & 0xFF == apsw.SQLITE_IOERR:
            raise apsw.IOError(line)
        if line != "ok":
            yield Problem(None, f"the database file: {line}"[:200], "SQLite finds it damaged", _FILE)


def missing_parts(db: apsw.Connection) -> Iterator[Problem]:
    """Yield the parts of a new file's schema that this file lacks, or has in another form."""
    new = apsw.Connection(":memory:")
    migrate(new)
    # Of tables only the names are compared: an older release may have written the rest of their text differently.
    sql = "SELECT type, name, iif(type = 'table', '', sql) FROM sqlite_schema WHERE substr(name, 1, 7) <> 'sqlite_'"
    expected, found = set(rows_of(new, sql, ())), set(rows_of(db, sql, ()))
    new.close()
    for kind, name, _ in sorted(expected - found):
        yield Problem(None, f"{kind} {name}", "it is missing, or not that of a new file", _COPY)


def meta_problems(db: apsw.Connection) -> Iterator[Problem]:
    row = first_row(db, "SELECT typeof(value), value FROM meta WHERE key = 'erasures'")
    if row is None or row[0] != "integer" or row[1] < 0:
        yield Problem(None, "meta erasures", "it is not the number of erasures so far", _COPY)
    for table in ("session", "log", "run", "timer"):
        number = "sid" if table == "session" else table
        last, highest = first_row(
            db,
            f"SELECT (SELECT seq FROM sqlite_sequence WHERE name = ?), (SELECT max({number}) FROM {table})",
            (table,),
        )
        if highest is not None and (last is None or last < highest):
            what = "it is behind the highest number in use, so that a number might be given out twice"
            yield Problem(None, f"the sequence of {table}", what, _COPY)


def tag_problems(db: apsw.Connection) -> Iterator[Problem]:
    """Yield the tags that differ from their sessions' rows, whose columns they repeat for lists."""
    differ = "(tag.owner, tag.agent, tag.status, tag.created) IS NOT (of.owner, of.agent, of.status, of.created)"
    sql = f"SELECT CAST(of.id AS BLOB) FROM tag JOIN session AS of ON of.sid = tag.sid WHERE {differ} LIMIT 20"
    for (session_id,) in rows_of(db, sql):
        what = "they do not say what its row says, so that lists by tag may not show it"
        yield Problem(session_id.decode(errors="replace"), "its tags in lists", what, _COPY)
