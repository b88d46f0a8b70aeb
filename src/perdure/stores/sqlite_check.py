"""A SQLite file looked at beneath its sessions: its pages, rows that belong to nobody, columns that filters go by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw

from perdure.errors import CorruptRecord
from perdure.model.session import AgentSessionInfo
from perdure.protocols import Problem
from perdure.stores.moving import merged
from perdure.stores.renaming import OpenHead
from perdure.stores.rows import StoredHead, Stretch, decode_info, unpacked_head
from perdure.stores.sqlite_jobs import read_value
from perdure.stores.sqlite_tables import rows_of

_FILE = (
    "Stop all writers, keep a copy of the file, and restore it from a backup. An index alone is mended by "
    "`sqlite3 FILE REINDEX`; of a file with damaged pages `sqlite3 FILE .recover` saves what it can."
)
_LEFT_OVER = "Nobody is shown it. Copy the store into a new file: what belongs to no session stays behind."
_ENDS = "Restore the session from a backup; until then nothing should be sent to it."
_COLUMNS = "Save the session once (a tag or a note will do): that writes the columns anew. Or copy it into a new store."
_REFS = "Do not delete the session it shows, which would erase that part. Copying the store into a new file mends it."
_USES = "Delete no other session, which might erase it. Copying the store into a new file mends it."

_BELONG_TO_NOBODY = {
    "head": "SELECT DISTINCT sid FROM head WHERE sid NOT IN (SELECT sid FROM session)",
    "batch": "SELECT DISTINCT sid FROM batch WHERE sid NOT IN (SELECT sid FROM session)",
    "run": "SELECT DISTINCT sid FROM run WHERE sid NOT IN (SELECT sid FROM session)",
    "inbox": "SELECT DISTINCT sid FROM inbox WHERE sid NOT IN (SELECT sid FROM session)",
    "key": "SELECT DISTINCT sid FROM key WHERE sid NOT IN (SELECT sid FROM session)",
    "tag": "SELECT DISTINCT sid FROM tag WHERE sid NOT IN (SELECT sid FROM session)",
    "uses": "SELECT DISTINCT sid FROM uses WHERE sid NOT IN (SELECT sid FROM session)",
    "value": "SELECT hash FROM value WHERE hash NOT IN (SELECT hash FROM uses)",
    "ref": "SELECT DISTINCT child FROM ref WHERE child NOT IN (SELECT sid FROM session)",
    "log": "SELECT log FROM log WHERE sid NOT IN (SELECT sid FROM session) AND log NOT IN (SELECT log FROM ref)",
    "msg": "SELECT DISTINCT log FROM msg WHERE log NOT IN (SELECT log FROM log)",
    "msg of an erased session": (
        "SELECT DISTINCT log FROM msg JOIN log USING (log) WHERE sid NOT IN (SELECT sid FROM session) AND NOT EXISTS"
        " (SELECT 1 FROM ref WHERE ref.log = msg.log AND ref.start <= msg.pos AND msg.pos < ref.stop)"
    ),
}
_WRONG_ENDS = {
    "its newest version": "version <> (SELECT coalesce(max(version), 0) FROM head WHERE head.sid = s.sid)",
    "the end of its log": "msg_end <> (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = s.log)",
    "the end of its record": "evt_end <> (SELECT coalesce(max(last), 0) FROM batch WHERE batch.sid = s.sid)",
    "the end of its inbox": "inbox_end <> (SELECT coalesce(max(seq), 0) FROM inbox WHERE inbox.sid = s.sid)",
    "its log": "NOT EXISTS (SELECT 1 FROM log WHERE log.log = s.log AND log.sid = s.sid AND log.name = '')",
    "the log of one of its runs": (
        "EXISTS (SELECT 1 FROM run LEFT JOIN log USING (log) WHERE run.sid = s.sid AND log.sid IS NOT s.sid)"
    ),
}


def check(db: apsw.Connection) -> list[Problem]:
    """All that is wrong. Each look is taken by itself, since a damaged page stops the one that meets it."""
    looks = (_pages, _left_over, _ends, _missing_values, _heads)
    return [problem for look in looks for problem in _surely(look(db))]


def _surely(found: Iterator[Problem]) -> Iterator[Problem]:
    try:
        yield from found
    except (apsw.Error, UnicodeError) as error:
        yield Problem(None, "the database file", f"it cannot be read throughout: {error}", _FILE)


def _pages(db: apsw.Connection) -> Iterator[Problem]:
    for (line,) in db.execute("PRAGMA integrity_check(20)"):
        if line != "ok":
            yield Problem(None, f"the database file: {line}"[:200], "SQLite finds it damaged", _FILE)


def _left_over(db: apsw.Connection) -> Iterator[Problem]:
    for table, sql in _BELONG_TO_NOBODY.items():
        for (number,) in db.execute(f"{sql} LIMIT 20"):
            yield Problem(None, f"{table} {number}", "it belongs to no session", _LEFT_OVER)


def _ends(db: apsw.Connection) -> Iterator[Problem]:
    for what, condition in _WRONG_ENDS.items():
        for (session_id,) in db.execute(f"SELECT CAST(id AS BLOB) FROM session AS s WHERE {condition}"):
            yield Problem(_text(session_id), what, "it is not what the session's row says", _ENDS)


def _missing_values(db: apsw.Connection) -> Iterator[Problem]:
    sql = (
        "SELECT CAST(session.id AS BLOB), hash FROM uses JOIN session USING (sid)"
        " WHERE hash NOT IN (SELECT hash FROM value)"
    )
    for session_id, key in db.execute(sql):
        yield Problem(_text(session_id), f"value {key}", "it is missing", _ENDS)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _heads(db: apsw.Connection) -> Iterator[Problem]:
    """The columns that filters go by, and the notes that keep what others show, against what the heads say."""
    sql = "SELECT sid, id, version, status, agent, owner, parent, created, updated FROM session ORDER BY sid"
    for sid, session_id, version, *columns in rows_of(db, sql, ()):
        try:
            heads = _heads_of(db, session_id, sid)
            info = decode_info(heads[version], session_id, version)
            yield from _columns(db, sid, info, columns)
            yield from _refs(db, sid, session_id, heads)
            yield from _uses(db, sid, session_id, heads)
        except (CorruptRecord, KeyError):
            continue  # a damaged head is reported by those who read the session


def _heads_of(db: apsw.Connection, session_id: str, sid: int) -> dict[int, bytes]:
    rows = rows_of(db, "SELECT version, crc, body FROM head WHERE sid = ?", (sid,))
    return {version: unpacked_head(body, crc, session_id, sid, version) for version, crc, body in rows}


def _columns(db: apsw.Connection, sid: int, info: AgentSessionInfo, columns: list[object]) -> Iterator[Problem]:
    names = ("status", "agent", "owner", "parent", "created", "updated")
    expected = (
        info.status.value,
        info.agent_name,
        info.owner,
        info.parent_id,
        info.created_at.timestamp(),
        info.updated_at.timestamp(),
    )
    for name, found, said in zip(names, columns, expected, strict=True):
        if found != said:
            yield Problem(info.id, f"column {name}", f"it says {found!r}, and the newest version {said!r}", _COLUMNS)
    if {tag for (tag,) in rows_of(db, "SELECT tag FROM tag WHERE sid = ?", (sid,))} != set(info.tags):
        yield Problem(info.id, "tags", "they are not those of the newest version", _COLUMNS)


def _refs(db: apsw.Connection, sid: int, session_id: str, heads: dict[int, bytes]) -> Iterator[Problem]:
    own = {log for (log,) in rows_of(db, "SELECT log FROM log WHERE sid = ?", (sid,))}
    noted = merged(rows_of(db, "SELECT log, start, stop FROM ref WHERE child = ?", (sid,)))
    for log, start, stop in _named(db, session_id, heads):
        if log not in own and not any(log == other and low <= start and stop <= high for other, low, high in noted):
            what = "the session shows it, and that is not noted where deletions look"
            yield Problem(session_id, f"messages {start} to {stop} of log {log}", what, _REFS)


def _uses(db: apsw.Connection, sid: int, session_id: str, heads: dict[int, bytes]) -> Iterator[Problem]:
    named = {key for version, raw in heads.items() for key in StoredHead(raw, session_id, version).hashes()}
    for key in sorted(named - {key for (key,) in rows_of(db, "SELECT hash FROM uses WHERE sid = ?", (sid,))}):
        yield Problem(
            session_id, f"value {key}", "a version names it, and that is not noted where deletions look", _USES
        )


def _named(db: apsw.Connection, session_id: str, heads: dict[int, bytes]) -> Iterable[Stretch]:
    met: set[Stretch] = set()

    def meet(log: int | str, start: int, stop: int) -> int | str:
        met.add((log, start, stop))
        return log

    for version, raw in heads.items():
        OpenHead(raw, session_id, version, lambda key: read_value(db, session_id, key)).renamed(meet)
    return merged(met)
