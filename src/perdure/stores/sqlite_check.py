"""A SQLite file looked at beneath its sessions: its pages and schema, rows that belong to nobody, notes, columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import apsw

from perdure.errors import CorruptRecord
from perdure.protocols import Problem
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.format.rows import key_checksum, log_checksum
from perdure.stores.noted import Noted, wrong_notes
from perdure.stores.sql_check import (
    COLUMNS,
    ENDS,
    KEY,
    LEFT_OVER,
    MISSING_VALUES,
    RULES,
    left_over,
    wrong_columns,
)
from perdure.stores.sqlite_jobs import read_value
from perdure.stores.sqlite_journal import check_posted
from perdure.stores.sqlite_schema import migrate
from perdure.stores.sqlite_search_check import check_index
from perdure.stores.sqlite_tables import first_row, rows_of

_FILE = (
    "Stop all writers, keep a copy of the file, and restore it from a backup. An index alone is mended by "
    "`sqlite3 FILE REINDEX`; of a file with damaged pages `sqlite3 FILE .recover` saves what it can."
)
# How SQLite says in a list of what is damaged that it could not read a page.
_UNREAD = re.compile(r"unable to get the page\. error code=(\d+)")
_COPY = "Nothing that was said is touched by it. Copying the store into a new file makes it anew."
_INBOX = "It has been dealt with, and is not needed. Copying the store into a new file leaves it behind."


def check(db: apsw.Connection) -> list[Problem]:
    """All that is wrong. Each look is taken by itself, since a damaged page stops the one that meets it.

    The search index comes first: seen before the store, it can be behind it, but never ahead.
    """
    looks = (_search, _pages, _schema, _meta, _left_over, _rules, _missing_values, _inboxes, _logs, _keys, _heads)
    return [problem for look in looks for problem in _surely(look, db)]


def _surely(look: Callable[[apsw.Connection], Iterator[Problem]], db: apsw.Connection) -> Iterator[Problem]:
    try:
        yield from look(db)
    except apsw.IOError:
        raise  # the disk failed, which says nothing of what is on it
    except (apsw.Error, UnicodeError) as error:
        yield Problem(None, "the database file", f"it cannot be read throughout: {error}", _FILE)


def _search(db: apsw.Connection) -> Iterator[Problem]:
    return check_index(db, Path(db.filename))


def _pages(db: apsw.Connection) -> Iterator[Problem]:
    for (line,) in db.execute("PRAGMA integrity_check(20)"):
        unread = _UNREAD.search(line)
        if unread and int(unread[1]) & 0xFF == apsw.SQLITE_IOERR:
            raise apsw.IOError(line)
        if line != "ok":
            yield Problem(None, f"the database file: {line}"[:200], "SQLite finds it damaged", _FILE)


def _schema(db: apsw.Connection) -> Iterator[Problem]:
    """Against a new file's."""
    new = apsw.Connection(":memory:")
    migrate(new)
    # What a table's own text says beyond its name, older releases may have said otherwise.
    sql = "SELECT type, name, iif(type = 'index', sql, '') FROM sqlite_schema WHERE substr(name, 1, 7) <> 'sqlite_'"
    expected, found = set(rows_of(new, sql, ())), set(rows_of(db, sql, ()))
    new.close()
    for kind, name, _ in sorted(expected - found):
        yield Problem(None, f"{kind} {name}", "it is missing, or not that of a new file", _COPY)


def _meta(db: apsw.Connection) -> Iterator[Problem]:
    row = first_row(db, "SELECT typeof(value), value FROM meta WHERE key = 'erasures'")
    if row is None or row[0] != "integer" or row[1] < 0:
        yield Problem(None, "meta erasures", "it is not the number of erasures so far", _COPY)
    for table in ("session", "log", "run"):
        number = "sid" if table == "session" else table
        last, highest = first_row(
            db,
            f"SELECT (SELECT seq FROM sqlite_sequence WHERE name = ?), (SELECT max({number}) FROM {table})",
            (table,),
        )
        if highest is not None and (last is None or last < highest):
            what = "it is behind the highest number in use, so that a number might be given out twice"
            yield Problem(None, f"the sequence of {table}", what, _COPY)


def _left_over(db: apsw.Connection) -> Iterator[Problem]:
    for table, sql in left_over().items():
        for (number,) in db.execute(f"{sql} LIMIT 20"):
            yield Problem(None, f"{table} {number}", "it belongs to no session", LEFT_OVER)


def _rules(db: apsw.Connection) -> Iterator[Problem]:
    for rule in RULES:
        for (session_id,) in db.execute(f"SELECT CAST(id AS BLOB) FROM session AS s WHERE {rule.condition}"):
            yield Problem(_text(session_id), rule.where, rule.what, rule.repair)


def _missing_values(db: apsw.Connection) -> Iterator[Problem]:
    for session_id, key in db.execute(MISSING_VALUES.format(id="CAST(session.id AS BLOB)")):
        yield Problem(_text(session_id), f"value {key}", "it is missing", ENDS)


def _inboxes(db: apsw.Connection) -> Iterator[Problem]:
    """The items that have been taken: nobody reads them, and their text is still there."""
    sql = (
        "SELECT session.id, inbox.sid, inbox.seq, inbox.run, inbox.kind, inbox.crc, inbox.body"
        " FROM inbox JOIN session ON session.sid = inbox.sid WHERE inbox.seq <= session.taken"
    )
    for session_id, *row in db.execute(sql):
        try:
            check_posted(session_id, *row)
        except CorruptRecord as error:
            yield Problem(session_id, error.position, error.reason, _INBOX)


def _logs(db: apsw.Connection) -> Iterator[Problem]:
    """The rows that say whose log it is."""
    for log, sid, name, crc in db.execute("SELECT log, sid, CAST(name AS BLOB), crc FROM log"):
        if type(sid) is not int or log_checksum(log, sid, name) != crc:
            yield Problem(None, f"log {log}", "its checksum does not match", ENDS)


def _keys(db: apsw.Connection) -> Iterator[Problem]:
    sql = (
        "SELECT CAST(session.id AS BLOB), key.sid, CAST(name AS BLOB), CAST(digest AS BLOB), key.version, crc"
        " FROM key JOIN session ON session.sid = key.sid"
    )
    for session_id, sid, name, digest, version, crc in db.execute(sql):
        if type(version) is not int or key_checksum(sid, name, digest, version) != crc:
            yield Problem(_text(session_id), f"key {_text(name)!r}", "its checksum does not match", KEY)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _heads(db: apsw.Connection) -> Iterator[Problem]:
    """The columns that filters go by, and the notes that erasures go by, against what the heads say."""
    sql = f"SELECT sid, id, version, {', '.join(COLUMNS)} FROM session ORDER BY sid"
    for sid, session_id, version, *columns in db.execute(sql):
        try:
            heads = _heads_of(db, session_id, sid)
            info = decode_info(heads[version], session_id, version)
            yield from wrong_columns(info, columns, _first(db, "SELECT tag FROM tag WHERE sid = ?", sid))
            yield from wrong_notes(session_id, heads, partial(read_value, db, session_id), _noted(db, sid))
        except (CorruptRecord, KeyError):
            continue  # a damaged head is reported by those who read the session


def _heads_of(db: apsw.Connection, session_id: str, sid: int) -> dict[int, bytes]:
    rows = rows_of(db, "SELECT version, crc, body FROM head WHERE sid = ?", (sid,))
    return {version: unpacked_head(body, crc, session_id, sid, version) for version, crc, body in rows}


def _noted(db: apsw.Connection, sid: int) -> Noted:
    return Noted(
        _first(db, "SELECT log FROM log WHERE sid = ?", sid),
        rows_of(db, "SELECT log, start, stop FROM ref WHERE child = ?", (sid,)),
        _first(db, "SELECT hash FROM uses WHERE sid = ?", sid),
    )


def _first(db: apsw.Connection, sql: str, sid: int) -> set[str]:
    return {each for (each,) in rows_of(db, sql, (sid,))}
