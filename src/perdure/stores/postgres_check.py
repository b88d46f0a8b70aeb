"""A PostgreSQL schema looked at beneath its sessions: rows that belong to nobody, notes and columns, the words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial

from perdure.errors import CorruptRecord
from perdure.protocols import Problem
from perdure.stores.format.heads import StoredHead, decode_info
from perdure.stores.moving import merged
from perdure.stores.noted import Noted, wrong_notes
from perdure.stores.postgres_archive import Db, first_row, read_heads, read_inbox, read_value, rows_of
from perdure.stores.postgres_rows import KEY_IS_SOUND, LOG_IS_SOUND, plain, restored
from perdure.stores.sql_check import (
    COLUMNS,
    ENDS,
    LEFT_OVER,
    MISSING_VALUES,
    RULES,
    left_over,
    wrong_columns,
)

_COPY = "Nothing that was said is touched by it. Copying the store into a new schema makes it anew."
_BACKUP = "It has changed since it was written. Restore the database, or the session, from a backup."
_INBOX = "If it has been dealt with, it is not needed, and copying the store into a new schema leaves it behind."
_CLAIMS = "A killed run of it would not be found by `recover`. Run `recover` on the session by its id."
_UNNOTED = (
    "SELECT id FROM session WHERE claim IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM claimed WHERE claimed.sid = session.sid)"
)
_UNCLAIMED = "SELECT id FROM session JOIN claimed ON claimed.sid = session.sid WHERE claim IS NULL"
# What waits is gathered first: one look at it for each message would take forever in a store that nobody searches.
_NEVER_FOUND = """
    WITH waiting AS MATERIALIZED (
        SELECT log, range_agg(int8range(start, stop)) AS stretches FROM unindexed WHERE start < stop GROUP BY log
    )
    SELECT msg.log, min(msg.pos) FROM msg LEFT JOIN waiting ON waiting.log = msg.log
    WHERE NOT coalesce(waiting.stretches @> msg.pos, false)
        AND NOT EXISTS (SELECT 1 FROM word WHERE word.log = msg.log AND word.pos = msg.pos)
    GROUP BY msg.log LIMIT 20
"""


def check(db: Db) -> list[Problem]:
    """All that is wrong, read in one snapshot."""
    looks = (_meta, _seals, _left_over, _rules, _claims, _missing_values, _words, _heads)
    return [problem for look in looks for problem in look(db)]


def _meta(db: Db) -> Iterator[Problem]:
    rows = rows_of(db, "SELECT erasures FROM meta")
    if len(rows) != 1 or rows[0][0] < 0:
        yield Problem(None, "meta erasures", "it is not the number of erasures so far", _COPY)
    for table in ("session", "log", "run"):
        number = "sid" if table == "session" else table
        last, highest = first_row(
            db,
            f"SELECT pg_sequence_last_value(pg_get_serial_sequence('{table}', '{number}')::regclass),"
            f" (SELECT max({number}) FROM {table})",
        )
        if highest is not None and (last is None or last < highest):
            what = "it is behind the highest number in use, so that a number might be given out twice"
            yield Problem(None, f"the sequence of {table}", what, _COPY)


def _seals(db: Db) -> Iterator[Problem]:
    for table, number, is_sound in (("key", "sid", KEY_IS_SOUND), ("log", "log", LOG_IS_SOUND)):
        for found, name in rows_of(db, f"SELECT {number}, name FROM {table} WHERE NOT ({is_sound}) LIMIT 20"):
            yield Problem(None, f"{table} {found}/{restored(name)}", "its checksum does not match", _BACKUP)


def _left_over(db: Db) -> Iterator[Problem]:
    for table, sql in left_over("claimed").items():
        for (number,) in rows_of(db, f"{sql} LIMIT 20"):
            yield Problem(None, f"{table} {number}", "it belongs to no session", LEFT_OVER)


def _rules(db: Db) -> Iterator[Problem]:
    for rule in RULES:
        for (session_id,) in rows_of(db, f"SELECT id FROM session AS s WHERE {rule.condition}"):
            yield Problem(session_id, rule.where, rule.what, rule.repair)


def _claims(db: Db) -> Iterator[Problem]:
    for (session_id,) in rows_of(db, _UNNOTED):
        yield Problem(session_id, "its claim", "it is not noted where those who recover look", _CLAIMS)
    for (session_id,) in rows_of(db, _UNCLAIMED):
        what = "it is noted where those who recover look, and there is none"
        yield Problem(session_id, "its claim", what, _COPY)


def _missing_values(db: Db) -> Iterator[Problem]:
    for session_id, key in rows_of(db, MISSING_VALUES.format(id="session.id")):
        yield Problem(session_id, f"value {key}", "it is missing", ENDS)


def _words(db: Db) -> Iterator[Problem]:
    for log, first in rows_of(db, _NEVER_FOUND):
        what = f"message {first} of log {log} is not in it, and nobody is going to put it there"
        yield Problem(None, f"the search index of log {log}", what, _COPY)


def _heads(db: Db) -> Iterator[Problem]:
    """The columns that filters go by, and the notes that erasures go by, against what the heads say."""
    sql = f"SELECT sid, id, version, {', '.join(COLUMNS)} FROM session ORDER BY sid"
    for sid, session_id, version, *columns in rows_of(db, sql):
        try:
            heads = read_heads(db, session_id, sid)
            info = decode_info(heads[version], session_id, version)
            tags = {tag for (tag,) in rows_of(db, "SELECT tag FROM tag WHERE sid = %s", sid)}
            yield from wrong_columns(info, columns, tags, plain)
            yield from wrong_notes(session_id, heads, partial(read_value, db, session_id), _noted(db, sid))
            yield from _fetched_along(db, sid, session_id, heads)
        except (CorruptRecord, KeyError):
            pass  # a damaged head is reported by those who read the session
        yield from _inbox(db, sid, session_id)


def _noted(db: Db, sid: int) -> Noted:
    return Noted(
        {log for (log,) in rows_of(db, "SELECT log FROM log WHERE sid = %s", sid)},
        rows_of(db, "SELECT log, start, stop FROM ref WHERE child = %s", sid),
        {key for (key,) in rows_of(db, "SELECT hash FROM uses WHERE sid = %s", sid)},
    )


def _fetched_along(db: Db, sid: int, session_id: str, heads: dict[int, bytes]) -> Iterator[Problem]:
    """What a head's columns say again of its body, for one statement to fetch it along."""
    value_of = lru_cache(64)(partial(read_value, db, session_id))
    for version, hashes, wanted in rows_of(db, "SELECT version, hashes, wanted FROM head WHERE sid = %s", sid):
        head = StoredHead(heads[version], session_id, version)
        values = head.gathered(value_of)
        if set(hashes) != values.keys() or (wanted is not None and not _is_wanted(head, values, wanted)):
            what = "it does not name the values and the messages that the version is made of"
            yield Problem(session_id, f"what is fetched along with version {version}", what, _COPY)


def _is_wanted(head: StoredHead, values: dict[str, bytes], wanted: Sequence[int]) -> bool:
    threes = list(zip(*(iter(wanted),) * 3, strict=False))
    return 3 * len(threes) == len(wanted) and merged(threes) == merged(head.wanted(values))


def _inbox(db: Db, sid: int, session_id: str) -> Iterator[Problem]:
    """All items: those that have been taken nobody reads, and their text is still there."""
    try:
        read_inbox(db, session_id, sid, taken_too=True)
    except CorruptRecord as error:
        yield Problem(session_id, error.position, error.reason, _INBOX)
