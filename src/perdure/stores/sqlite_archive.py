"""Sessions of a SQLite store given out and taken in whole: jobs for its reader and its writer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import apsw
import msgspec

from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo
from perdure.protocols import ArchivedSession, Entry, JournalEntry
from perdure.stores.format import packing
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.format.rows import Stretch, Values, check_row, checksum, prepare_batch, prepare_entries
from perdure.stores.landing import Landing, require_same, run_stretches
from perdure.stores.moving import LENT, MOVED, Material, Owner, Rows, archive, busy
from perdure.stores.sqlite_jobs import read_value
from perdure.stores.sqlite_journal import read_inbox, read_record
from perdure.stores.sqlite_tables import (
    first_row,
    holder_of,
    new_log,
    require_absent,
    require_key,
    require_log,
    rows_of,
    write_batch,
    write_key,
    write_posted,
)

_ENTRIES_AT_ONCE = 32


def dump(db: apsw.Connection, session_id: SessionId, origin: str, at: float, alone: bool) -> ArchivedSession:
    row = first_row(db, "SELECT sid, claim, expires, version, msg_end FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        require_absent(db, session_id)
        raise SessionNotFound(session_id)
    sid, claim, expires, version, end = row
    holder = None if claim is None else holder_of(session_id, claim)
    if holder is not None and expires > at and not holder.is_gone:
        raise busy(session_id, holder.owner)
    logs = SqliteLogs(db, origin)
    material = Material(
        session_id,
        _heads(db, session_id, sid, version),
        lambda key: read_value(db, session_id, key),
        {name: _whole(session_id, logs, log, name, end) for log, name, end in _logs_of(db, session_id, sid, end)},
        _plain(read_record(db, session_id, after=0, limit=None, last=None, run=None)),
        _plain(read_inbox(db, session_id, after=0)),
        dict(_keys(db, session_id, sid)),
        claim is not None,
    )
    return archive(material, logs, alone=alone)


def _heads(db: apsw.Connection, session_id: str, sid: int, newest: int) -> dict[int, bytes]:
    """The versions, by number; CorruptRecord if the last of them is not there. (Others are looked for later.)"""
    rows = db.execute("SELECT version, crc, body FROM head WHERE sid = ?", (sid,))
    found = {version: unpacked_head(body, crc, session_id, sid, version) for version, crc, body in rows}
    if max(found, default=0) != newest:
        raise CorruptRecord(session_id, f"head {newest}", "it should be the last one, and is not")
    return found


def _keys(db: apsw.Connection, session_id: str, sid: int) -> Iterator[tuple[str, tuple[str, int]]]:
    for name, digest, version, crc in rows_of(db, "SELECT name, digest, version, crc FROM key WHERE sid = ?", (sid,)):
        require_key(session_id, sid, name, digest, version, crc)
        yield name, (digest, version)


_LOGS = """
    SELECT log.log, log.sid, name, crc,
        (SELECT coalesce(max(end_pos), 0) FROM run WHERE run.sid = ?1 AND run.log = log.log) FROM log WHERE sid = ?1
"""


def _logs_of(db: apsw.Connection, session_id: str, sid: int, main_end: int) -> Iterator[tuple[int, str, int]]:
    """The logs of a session, each with its name and where it ends at least; CorruptRecord if one is missing."""
    found = {}
    for log, owner, name, crc, end in rows_of(db, _LOGS, (sid,)):
        require_log(session_id, log, owner, name, crc)
        found[log] = (log, name, main_end if name == "" else end)
    named = "SELECT log FROM session WHERE sid = ?1 UNION SELECT log FROM run WHERE sid = ?1"
    for (log,) in rows_of(db, named, (sid,)):
        if log not in found:
            raise CorruptRecord(session_id, f"log {log}", "it is missing")
    return iter(found.values())


def _whole(session_id: str, logs: SqliteLogs, log: int, name: str, end: int) -> Rows:
    """All messages of a log; CorruptRecord if one is missing. What is kept for others' sake may have gaps."""
    rows = logs.rows(log, 0, None)
    if not name.startswith(LENT):
        for position in range(max(end, max(rows, default=-1) + 1)):
            if position not in rows:
                raise CorruptRecord(session_id, f"message {position} of log {log}", "it is missing")
    return rows


def _plain(entries: Iterable[JournalEntry]) -> tuple[Entry, ...]:
    return tuple(Entry(entry.kind, entry.body, entry.run) for entry in entries)


class SqliteLogs:
    """The logs of a file."""

    def __init__(self, db: apsw.Connection, origin: str) -> None:
        self._db = db
        self.origin = origin

    def owner_of(self, log: int | str) -> Owner | None:
        sql = (
            "SELECT session.id, log.name, session.created, log.sid, log.crc"
            " FROM log JOIN session USING (sid) WHERE log.log = ?"
        )
        row = first_row(self._db, sql, (log,))
        if row is None:
            return None
        session_id, name, created, sid, crc = row
        require_log(session_id, int(log), sid, name, crc)
        return Owner(session_id, name, created)

    def log_of(self, owner: str, branch: str, created: float) -> int | str | None:
        sql = "SELECT log.log FROM session JOIN log USING (sid) WHERE session.id = ? AND name = ? AND created = ?"
        row = first_row(self._db, sql, (owner, branch, created))
        return None if row is None else int(row[0])

    def rows(self, log: int | str, start: int, stop: int | None) -> Rows:
        sql = "SELECT pos, crc, body FROM msg WHERE log = ?1 AND pos >= ?2 AND (?3 IS NULL OR pos < ?3) ORDER BY pos"
        found: dict[int, bytes] = {}
        for pos, crc, body in self._db.execute(sql, (log, start, stop)):
            check_row(body, crc, None, f"message {pos} of log {log}", int(log), pos)
            found[pos] = body
        return found

    def holds(self, log: int | str, start: int, stop: int) -> bool:
        sql = "SELECT count(*) FROM msg WHERE log = ? AND pos >= ? AND pos < ?"
        return bool(first_row(self._db, sql, (log, start, stop)) == (stop - start,))


def restore(db: apsw.Connection, archived: ArchivedSession, origin: str, at: float) -> bool:
    landing = Landing(archived, SqliteLogs(db, origin))
    if first_row(db, "SELECT 1 FROM session WHERE id = ?", (str(archived.session_id),)):
        require_same(archived, dump(db, archived.session_id, origin, at, bool(archived.lent)))
        return False
    require_absent(db, archived.session_id)
    _write(db, landing)
    return True


def _write(db: apsw.Connection, landing: Landing) -> None:
    archived = landing.archived
    info = decode_info(archived.heads[-1], archived.session_id, len(archived.heads))
    sid = _write_session(db, archived, info)
    logs = {branch: _write_log(db, sid, branch, rows) for branch, rows in landing.own.items()}
    main = logs[""]
    db.execute(
        "UPDATE session SET log = ?, msg_end = ?, epoch = ? WHERE sid = ?",
        (main, max(landing.own[""], default=-1) + 1, sid << 20, sid),
    )
    db.executemany("INSERT INTO tag (tag, sid) VALUES (?, ?)", [(tag, sid) for tag in info.tags])
    for version, (raw, values) in enumerate(landing.heads(logs.__getitem__), 1):
        _write_head(db, sid, version, raw, values)
    _write_refs(db, sid, landing.shown_of_others())
    _write_record(db, sid, archived, logs)
    for seq, prepared in enumerate(prepare_entries(archived.inbox), 1):
        write_posted(db, sid, seq, *prepared)
    for name, (digest, version) in archived.keys.items():
        write_key(db, sid, name, digest, version)


def _write_session(db: apsw.Connection, archived: ArchivedSession, info: AgentSessionInfo) -> int:
    db.execute(
        "INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, evt_end, inbox_end,"
        " claim, expires) VALUES (?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            str(info.id),
            info.version,
            info.status.value,
            info.agent_name,
            info.owner,
            None if info.parent_id is None else str(info.parent_id),
            info.created_at.timestamp(),
            info.updated_at.timestamp(),
            len(archived.entries),
            len(archived.inbox),
            msgspec.json.encode(MOVED) if archived.interrupted else None,
            0.0 if archived.interrupted else None,
        ),
    )
    return db.last_insert_rowid()


def _write_log(db: apsw.Connection, sid: int, branch: str, rows: Rows) -> int:
    log = new_log(db, sid, branch)
    numbered = [(log, pos, checksum(rows[pos], log, pos), rows[pos]) for pos in sorted(rows)]
    db.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", numbered)
    return log


def _write_head(db: apsw.Connection, sid: int, version: int, raw: bytes, values: Values) -> None:
    body = packing.pack(raw)
    db.execute(
        "INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)",
        (sid, version, checksum(body, sid, version), body),
    )
    for key, value in values.items():
        db.execute("INSERT OR IGNORE INTO value (hash, body) VALUES (?, ?)", (key, packing.pack(value)))
        db.execute("INSERT OR IGNORE INTO uses (hash, sid) VALUES (?, ?)", (key, sid))


def _write_refs(db: apsw.Connection, sid: int, stretches: Iterable[Stretch]) -> None:
    noted = [(log, sid, start, stop) for log, start, stop in stretches]
    db.executemany("INSERT INTO ref (log, child, start, stop) VALUES (?, ?, ?, ?)", noted)


def _write_record(db: apsw.Connection, sid: int, archived: ArchivedSession, logs: dict[str, int]) -> None:
    for start in range(0, len(archived.entries), _ENTRIES_AT_ONCE):
        entries = archived.entries[start : start + _ENTRIES_AT_ONCE]
        write_batch(db, sid, start + len(entries), prepare_batch(entries), (logs[""], 0, 0))
    for loop, (branch, start, stop) in run_stretches(archived).items():
        if branch not in logs:
            logs[branch] = _write_log(db, sid, branch, {})
        db.execute(
            "UPDATE run SET log = ?, first_pos = ?, end_pos = ? WHERE sid = ? AND loop = ?",
            (logs[branch], start, stop, sid, loop),
        )
