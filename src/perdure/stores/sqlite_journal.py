"""The journal's side of the SQLite store: claims, appends, the inbox, and reading the record."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import apsw
import msgspec

from perdure import codec
from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    SessionConflict,
    SessionNotFound,
)
from perdure.model.ids import SessionId
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Entry, JournalEntry, Key, RunOnRecord, StoredAt
from perdure.stores.claims import Holder
from perdure.stores.sqlite_tables import (
    LAST,
    entry_checksum,
    first_row,
    holder_of,
    require_absent,
    require_gone,
    require_same,
    rows_of,
    write_entries,
    write_messages,
)


def claim(
    db: apsw.Connection,
    session_id: SessionId,
    version: int,
    holder: Holder,
    lease: float,
    at: float,
    origin: str,
    rows: Sequence[tuple[str, bytes]],
    entries: Sequence[tuple[Entry, bytes]],
) -> tuple[Claim, Appended]:
    row = first_row(db, "SELECT version, epoch, claim, expires FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        raise SessionNotFound(session_id)
    found, epoch, held, expires = row
    if held is not None and expires > at:
        require_gone(session_id, held)
    if found != version:
        raise SessionConflict(session_id, version, found)
    db.execute(
        "UPDATE session SET epoch = epoch + 1, claim = ?, expires = ? WHERE id = ?",
        (msgspec.json.encode(holder), at + lease, str(session_id)),
    )
    taken = Claim(session_id, epoch + 1, version, holder.owner, lease)
    return taken, append(db, taken, at, origin, "", rows, entries)


def append(
    db: apsw.Connection,
    claim: Claim,
    at: float,
    origin: str,
    log_name: str,
    rows: Sequence[tuple[str, bytes]],
    entries: Sequence[tuple[Entry, bytes]],
    taken: int = 0,
) -> Appended:
    row = first_row(
        db,
        "UPDATE session SET expires = ?, msg_end = msg_end + ?, evt_end = evt_end + ?, taken = max(taken, ?)"
        " WHERE id = ? AND epoch = ? AND claim IS NOT NULL RETURNING sid, log, msg_end, evt_end",
        (at + claim.lease, 0 if log_name else len(rows), len(entries), taken, str(claim.session_id), claim.epoch),
    )
    if row is None:
        raise ClaimLost(claim.session_id, claim.epoch)
    sid, log, msg_end, evt_end = row
    start = msg_end - len(rows)
    if log_name:
        log, start = _branch_log(db, sid, log_name)
    write_messages(db, log, start, [body for _, body in rows])
    write_entries(db, "event", sid, evt_end - len(entries), entries, (log, start, start + len(rows)))
    ref = LogRef(origin, log)
    return Appended({key: StoredAt(ref, pos) for pos, (key, _) in enumerate(rows, start)}, evt_end)


def _branch_log(db: apsw.Connection, sid: int, name: str) -> tuple[int, int]:
    db.execute("INSERT OR IGNORE INTO log (sid, name) VALUES (?, ?)", (sid, name))
    (log,) = first_row(db, "SELECT log FROM log WHERE sid = ? AND name = ?", (sid, name))
    (start,) = first_row(db, "SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE log = ?", (log,))
    return log, start


def heartbeat(db: apsw.Connection, claim: Claim, at: float) -> None:
    db.execute(
        "UPDATE session SET expires = ? WHERE id = ? AND epoch = ? AND claim IS NOT NULL",
        (at + claim.lease, str(claim.session_id), claim.epoch),
    )
    if db.changes() == 0:
        raise ClaimLost(claim.session_id, claim.epoch)


def release(db: apsw.Connection, claim: Claim) -> None:
    db.execute(
        "UPDATE session SET claim = NULL, expires = NULL WHERE id = ? AND epoch = ?",
        (str(claim.session_id), claim.epoch),
    )


def post(db: apsw.Connection, session_id: str, entry: tuple[Entry, bytes]) -> int:
    row = first_row(
        db, "UPDATE session SET inbox_end = inbox_end + 1 WHERE id = ? RETURNING sid, inbox_end", (session_id,)
    )
    if row is None:
        raise SessionNotFound(session_id)
    sid, seq = row
    write_entries(db, "inbox", sid, seq - 1, [entry])
    return int(seq)


def read_entries(
    db: apsw.Connection,
    session_id: str,
    table: str,
    after: int,
    limit: int | None,
    last: int | None = None,
    run: str | None = None,
) -> list[JournalEntry]:
    row = first_row(
        db,
        f"SELECT sid, taken, {'inbox_end' if table == 'inbox' else 'evt_end'},"
        f" (SELECT coalesce(max(seq), 0) FROM {table} WHERE {table}.sid = session.sid),"
        " (SELECT id FROM session AS same WHERE same.sid = session.sid) FROM session WHERE id = ?",
        (session_id,),
    )
    if row is None:
        require_absent(db, session_id)
        raise SessionNotFound(session_id)
    require_same(row[4], session_id)
    sid, taken, end, newest, _ = row
    if newest != end:
        raise CorruptRecord(session_id, f"{table} {end}", f"it should be the last one, and {newest} is")
    after = max(after, taken) if table == "inbox" else after
    where, values = f"{table}.sid = ? AND seq > ?", [sid, min(after, LAST)]
    if run is not None:
        found = first_row(db, "SELECT run, first_seq, last_seq FROM run WHERE sid = ? AND loop = ?", (sid, run))
        where += f" AND {table}.run = ? AND seq BETWEEN ? AND ?"
        values += found or (0, 0, 0)
    order, most = ("seq DESC", last) if last is not None else ("seq", limit)
    source = "run.loop, kind, crc, body FROM event LEFT JOIN run ON run.run = event.run"
    if table == "inbox":
        source = "run, kind, crc, body FROM inbox"
    rows = rows_of(
        db,
        f"SELECT seq, {source} WHERE {where} ORDER BY {order} LIMIT ?",
        (*values, -1 if most is None else most),
    )
    ordered = rows if last is None else rows[::-1]
    if run is None:
        first = after + 1 if last is None else max(after, end - last) + 1
        final = end if limit is None or last is not None else min(end, after + limit)
        for expected, seq in zip_longest(range(first, final + 1), (each[0] for each in ordered)):
            if expected != seq:
                raise CorruptRecord(session_id, f"{table} {expected}", "it is missing")
    return [_entry_of(session_id, table, sid, *each) for each in ordered]


def _entry_of(
    session_id: str, table: str, sid: int, seq: int, run: str | None, kind: str, crc: int, body: bytes
) -> JournalEntry:
    if type(body) is not bytes or entry_checksum(sid, seq, run, kind, body) != crc:
        raise CorruptRecord(session_id, f"{table} {seq}", "its checksum does not match")
    return JournalEntry(seq, kind, codec.decode_plain(body), run)


def runs(
    db: apsw.Connection, session_id: str, origin: str, limit: int | None, before: int | None, run: str | None
) -> list[RunOnRecord]:
    row = first_row(db, "SELECT sid FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    sid = row[0]
    rows = rows_of(
        db,
        "SELECT loop, first_seq, last_seq, log, first_pos, end_pos FROM run"
        " WHERE sid = ? AND first_seq < ? AND (?3 IS NULL OR loop = ?3) ORDER BY first_seq DESC LIMIT ?4",
        (sid, LAST if before is None else before, run, -1 if limit is None else limit),
    )
    found = []
    for loop, first_seq, last_seq, log, start, stop in reversed(rows):
        first, last = (_entry_at(db, session_id, sid, seq) for seq in (first_seq, last_seq))
        found.append(RunOnRecord(loop, first, last, LogRef(origin, log), start, stop))
    return found


def _entry_at(db: apsw.Connection, session_id: str, sid: int, seq: int) -> JournalEntry:
    sql = (
        "SELECT seq, run.loop, kind, crc, body FROM event LEFT JOIN run ON run.run = event.run"
        " WHERE event.sid = ? AND seq = ?"
    )
    row = first_row(db, sql, (sid, seq))
    if row is None:
        raise CorruptRecord(session_id, f"event {seq}", "it is missing")
    return _entry_of(session_id, "event", sid, *row)


def log_of(db: apsw.Connection, session_id: str, name: str, origin: str) -> tuple[LogRef, int]:
    sql = (
        "SELECT log.log, (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = log.log)"
        " FROM session LEFT JOIN log ON log.sid = session.sid AND log.name = ? WHERE session.id = ?"
    )
    row = first_row(db, sql, (name, session_id))
    if row is None or row[0] is None:
        raise SessionNotFound(session_id if row is None else f"{session_id}/{name}")
    return LogRef(origin, row[0]), row[1]


def lapsed(db: apsw.Connection, at: float) -> list[SessionId]:
    rows = rows_of(db, "SELECT id, claim, expires FROM session WHERE claim IS NOT NULL ORDER BY sid", ())
    return [SessionId(key) for key, claim, expires in rows if expires <= at or holder_of(key, claim).is_gone]


def find_key(db: apsw.Connection, session_id: str, name: str) -> tuple[Key, int] | None:
    sql = "SELECT digest, key.version FROM key JOIN session USING (sid) WHERE session.id = ? AND name = ?"
    row = first_row(db, sql, (session_id, name))
    return None if row is None else (Key(name, row[0]), row[1])


def is_claimed(db: apsw.Connection, session_id: str, at: float) -> bool:
    row = first_row(db, "SELECT claim, expires FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    claim, expires = row
    return claim is not None and expires > at and not holder_of(session_id, claim).is_gone
