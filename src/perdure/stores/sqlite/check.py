"""Checks of a SQLite file below its rows: its pages, its schema, its counters and its search index."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from perdure.protocols import MEND_FIRST, Problem
from perdure.stores.sqlite.schema import first_row, migrate, rows_of
from perdure.stores.sqlite.search_check import check_index

_FILE = (
    "Stop all writers, keep a copy of the file, and restore it from a backup. "
    "If there is none, `sqlite3 FILE .recover` saves what it can."
)
# SQLite's words, in its list of damage, for a page that it could not read.
_UNREAD = re.compile(r"unable to get the page\. error code=(\d+)")
_OF_INDEX = re.compile(r"\bindex (\w+)$")
_OF_TREE = re.compile(r"(?:Tree|On tree page) (\d+) ")
_UNUSED = re.compile(r"Page \d+(?:: | is )never used")
_TREES = "*** in database main ***"
GIVE_BACK = (
    "It is unused. `perdure fsck --repair` frees it. That rewrites the whole file, "
    "and the disk needs space for a second one."
)
_COPY = "No message is affected. Copying the store into a new file rebuilds it."


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
        raise  # the disk failed: this is not damage of the file
    except (apsw.Error, UnicodeError) as error:
        yield Problem(None, "the database file", f"it cannot be read throughout: {error}", _FILE)


def _search(db: apsw.Connection) -> Iterator[Problem]:
    return check_index(db, Path(db.filename))


def page_problems(db: apsw.Connection) -> Iterator[Problem]:
    """Yield what SQLite finds damaged. The repair of a damaged index is MEND_FIRST, if its table can be read."""
    lines: list[str] = []
    try:
        lines.extend(_lines(db, "integrity_check(20)"))
    except apsw.CorruptError:  # SQLite ends its check at a cell that it cannot decode, and does not say of which tree
        problems = [*_unreadable_indexes(db)]
        yield from [*_told(db, lines), *problems]
        if not problems:
            raise
    else:
        yield from _told(db, lines)


def _told(db: apsw.Connection, lines: Sequence[str]) -> Iterator[Problem]:
    """Yield the lines of SQLite's check as problems."""
    roots, lost = _indexes_by_root(db), _indexes_without_rows(db)
    for line in lines:
        name = _index_in(line, roots)
        where = f"the database file: {line}" if name is None else f"index {name}: {line}"
        is_mendable = name is not None and name not in lost
        repair = MEND_FIRST if is_mendable else GIVE_BACK if _is_unused(db, line) else _FILE
        yield Problem(None, where[:200], "SQLite finds it damaged", repair)


def _is_unused(db: apsw.Connection, line: str) -> bool:
    return _UNUSED.match(line) is not None and has_only_unused_pages(db)


def _indexes_without_rows(db: apsw.Connection) -> set[str]:
    """Return the indexes of tables that cannot be read, so that nothing is there to make them of."""
    found: set[str] = set()
    for (table,) in rows_of(db, "SELECT DISTINCT tbl_name FROM sqlite_schema WHERE type = 'index'"):
        try:
            rows_of(db, f'SELECT count(*) FROM "{table}" NOT INDEXED')
        except apsw.CorruptError:
            sql = "SELECT name FROM sqlite_schema WHERE type = 'index' AND tbl_name = ?"
            found |= {name for (name,) in rows_of(db, sql, (table,))}
    return found


def tree_damage(db: apsw.Connection) -> set[str]:
    """Return what is wrong with the trees of pages. Pages in no use are left out.

    Raise apsw.CorruptError if the trees are sound, and a row of a table cannot be decoded.
    """
    row: Any = db.execute("PRAGMA quick_check(1000)").fetchone()
    lines = row[0].splitlines()  # the first row has all about trees
    return {line for line in lines[1:] if not _UNUSED.match(line)} if lines[0] == _TREES else set()


def has_only_unused_pages(db: apsw.Connection) -> bool:
    """Tell whether pages are in no use, and nothing else is wrong: beside other damage, they may hold rows."""
    lines = [*_lines(db, "quick_check(1000)")]
    return bool(lines) and all(map(_UNUSED.match, lines))


def _lines(db: apsw.Connection, pragma: str) -> Iterator[str]:
    for (text,) in db.execute(f"PRAGMA {pragma}"):
        # SQLite lists a failed read as damage. The low byte of an extended code is the primary one.
        unread = _UNREAD.search(text)
        if unread and int(unread[1]) & 0xFF == apsw.SQLITE_IOERR:
            raise apsw.IOError(text)
        yield from (line for line in text.splitlines() if line not in ("ok", _TREES))


def _indexes_by_root(db: apsw.Connection) -> dict[int, str]:
    return dict(rows_of(db, "SELECT rootpage, name FROM sqlite_schema WHERE type = 'index'"))


def _index_in(line: str, roots: Mapping[int, str]) -> str | None:
    """Return the name of the index that a line of SQLite's is about."""
    if named := _OF_INDEX.search(line):
        return named[1]
    tree = _OF_TREE.match(line)
    return roots.get(int(tree[1])) if tree else None


def _unreadable_indexes(db: apsw.Connection) -> Iterator[Problem]:
    """Yield the tables whose rows can be read, and whose indexes cannot."""
    for (table,) in rows_of(db, "SELECT DISTINCT tbl_name FROM sqlite_schema WHERE type = 'index'"):
        with suppress(apsw.CorruptError):
            [*_lines(db, f"quick_check('{table}')")]
            try:
                [*_lines(db, f"integrity_check('{table}')")]
            except apsw.CorruptError as error:
                yield Problem(None, f"index of table {table}", f"it cannot be read: {error}", MEND_FIRST)


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
