"""Erasing from a SQLite store for good: what is deleted, redacted or cleared up, the search index has to forget too."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any

import apsw

from perdure import codec
from perdure.errors import CorruptRecord, SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.protocols import Entry
from perdure.stores import redaction
from perdure.stores import sqlite_jobs as jobs
from perdure.stores.format import packing
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import (
    Batch,
    batch_checksum,
    check_row,
    checksum,
    entry_checksum,
    prepare_batch,
    prepare_entries,
)
from perdure.stores.redaction import Log, Places, Redone, Request, Row, Version, next_version
from perdure.stores.sqlite_journal import read_record
from perdure.stores.sqlite_search import UNKNOWN, Changed, Erased
from perdure.stores.sqlite_tables import first_row, meta, require_gone, rows_of, write_batch


def delete(db: apsw.Connection, session_id: str, at: float, *, indexed: bool) -> Erased:
    """Erase a session, but for what others show of it. Where no index has its messages, they need not be read."""
    before = int(meta(db, "erasures"))
    if not indexed:
        jobs.delete(db, session_id, at)
        return _erased(db, UNKNOWN, ())
    logs = rows_of(
        db,
        "SELECT log.log FROM log JOIN session USING (sid) WHERE id = ?1"
        " UNION SELECT ref.log FROM ref JOIN session ON session.sid = ref.child WHERE id = ?1",
        (str(session_id),),
    )
    held = _messages_of(db, [log for (log,) in logs])
    jobs.delete(db, session_id, at)
    return _erased(db, before, held)


def delete_many(
    db: apsw.Connection, session_ids: Iterable[SessionId], at: float, *, indexed: bool
) -> tuple[list[SessionId], Erased]:
    """Erase sessions, but for those that are being run or gone already; which they were."""
    before = int(meta(db, "erasures"))
    done: list[SessionId] = []
    held: list[Changed] = []
    for session_id in session_ids:
        with suppress(SessionBusy, SessionNotFound):  # raised before anything is changed
            held += delete(db, session_id, at, indexed=indexed).changed
            done.append(session_id)
    return done, _erased(db, before if indexed else UNKNOWN, held)


def gc(db: apsw.Connection) -> Erased:
    """Erase what is left of erased sessions and shown by nobody."""
    before = int(meta(db, "erasures"))
    gone = "SELECT log FROM log WHERE NOT EXISTS (SELECT 1 FROM session WHERE session.sid = log.sid)"
    logs = [log for (log,) in rows_of(db, gone, ())]
    held = _messages_of(db, logs)
    for log in logs:
        jobs.erase_unshown(db, log)
    unused = "DELETE FROM value WHERE NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash)"
    db.execute(unused)
    # Though there be nothing: what is indexed from here on waits until all traces are gone.
    jobs.count_erasure(db)
    return _erased(db, before, held)


def _messages_of(db: apsw.Connection, logs: Iterable[int]) -> list[Changed]:
    held: list[Changed] = []
    for log in logs:
        for rowid, pos, crc, body in db.execute("SELECT rowid, pos, crc, body FROM msg WHERE log = ?", (log,)):
            held.append(Changed(rowid, log, body if checksum(body, log, pos) == crc else b""))
    return held


def _erased(db: apsw.Connection, before: int, held: Iterable[Changed]) -> Erased:
    """Those of the messages that are there no more."""
    gone = [each for each in held if first_row(db, "SELECT 1 FROM msg WHERE rowid = ?", (each.rowid,)) is None]
    (newest,) = first_row(db, "SELECT coalesce(max(rowid), 0) FROM msg")
    return Erased(before, int(meta(db, "erasures")), newest, gone)


def redact(db: apsw.Connection, request: Request, at: datetime) -> tuple[int, Erased]:
    """Replace the content of messages; how many were not replaced before."""
    before = int(meta(db, "erasures"))
    bench = _Bench(db, at)
    replaced = redaction.redact(bench, request, at)
    jobs.count_erasure(db)
    return replaced, _erased(db, before, ())._replace(changed=bench.changed)


class _Bench:
    """The rows of a SQLite store, inside a transaction that writes."""

    def __init__(self, db: apsw.Connection, at: datetime) -> None:
        self._db = db
        self._at = at
        self._values: dict[str, bytes] = {}
        self.changed: list[Changed] = []

    def history(self, session_id: str) -> Iterator[Row]:
        sid = self._sid(session_id)
        stretches = rows_of(
            self._db,
            "SELECT log, 0, ?2 FROM log WHERE sid = ?1 UNION SELECT log, start, stop FROM ref WHERE child = ?1",
            (sid, 2**62),
        )
        sql = "SELECT pos, crc, body FROM msg WHERE log = ? AND pos >= ? AND pos < ?"
        for log, start, stop in stretches:
            for pos, crc, body in self._db.execute(sql, (log, start, stop)):
                check_row(body, crc, session_id, f"message {pos} of log {log}", log, pos)
                yield Row(log, pos, body)

    def _sid(self, session_id: str) -> int:
        row = first_row(self._db, "SELECT sid FROM session WHERE id = ?", (str(session_id),))
        if row is None:
            raise SessionNotFound(session_id)
        return int(row[0])

    def row(self, log: Log, position: int) -> bytes:
        row = first_row(self._db, "SELECT crc, body FROM msg WHERE log = ? AND pos = ?", (log, position))
        if row is None:
            raise CorruptRecord(None, f"message {position} of log {log}", "it is missing")
        check_row(row[1], row[0], None, f"message {position} of log {log}", int(log), position)
        return bytes(row[1])

    def concerned(self, places: Places) -> Collection[str]:
        found: dict[str, None] = {}
        for log, positions in places.items():
            owner = "SELECT id FROM log JOIN session USING (sid) WHERE log.log = ?"
            found |= {key: None for (key,) in rows_of(self._db, owner, (log,))}
            shown = "SELECT id, start, stop FROM ref JOIN session ON session.sid = ref.child WHERE ref.log = ?"
            for key, start, stop in rows_of(self._db, shown, (log,)):
                if any(start <= position < stop for position in positions):
                    found[key] = None
        todo = list(found)
        while todo:
            forks = [key for (key,) in rows_of(self._db, "SELECT id FROM session WHERE parent = ?", (todo.pop(),))]
            todo += [key for key in forks if key not in found]
            found |= dict.fromkeys(forks)
        return found

    def require_free(self, session_id: str) -> None:
        claim, expires = first_row(self._db, "SELECT claim, expires FROM session WHERE id = ?", (session_id,))
        if claim is not None and expires > self._at.timestamp():
            require_gone(session_id, claim)

    def versions(self, session_id: str) -> Iterator[Version]:
        sid = self._sid(session_id)
        rows = rows_of(self._db, "SELECT version, crc, body FROM head WHERE sid = ? ORDER BY version", (sid,))
        for version, crc, body in rows:
            raw = unpacked_head(body, crc, session_id, sid, version)
            values = StoredHead(raw, session_id, version).gathered(partial(self._value, session_id))
            yield Version(version, raw, values)

    def _value(self, session_id: str, key: str) -> bytes:
        if key not in self._values:
            self._values[key] = jobs.read_value(self._db, session_id, key)
        return self._values[key]

    def entries(self, session_id: str) -> list[Entry]:
        found = read_record(self._db, session_id, 0, None, None, None)
        return [Entry(each.kind, each.body, each.run) for each in found]

    def inbox(self, session_id: str) -> list[Entry]:
        sql = "SELECT kind, body, run FROM inbox WHERE sid = ? ORDER BY seq"
        rows = rows_of(self._db, sql, (self._sid(session_id),))
        return [Entry(kind, codec.decode_plain(body), run) for kind, body, run in rows]

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        for row in rows:
            self._replace_message(row)
        for redone in sessions:
            self._replace_session(redone, self._sid(redone.session_id))

    def _replace_message(self, row: Row) -> None:
        place = (row.log, row.position)
        rowid, old = first_row(self._db, "SELECT rowid, body FROM msg WHERE log = ? AND pos = ?", place)
        crc = checksum(row.body, int(row.log), row.position)
        self._db.execute("UPDATE msg SET crc = ?, body = ? WHERE rowid = ?", (crc, row.body, rowid))
        self.changed.append(Changed(rowid, int(row.log), old, row.body))

    def _replace_session(self, redone: Redone, sid: int) -> None:
        for version in redone.versions:
            body = packing.pack(version.raw)
            self._db.execute(
                "UPDATE head SET crc = ?, body = ? WHERE sid = ? AND version = ?",
                (checksum(body, sid, version.number), body, sid, version.number),
            )
            for key, value in version.values.items():
                self._db.execute("INSERT OR IGNORE INTO value (hash, body) VALUES (?, ?)", (key, packing.pack(value)))
                self._db.execute("INSERT OR IGNORE INTO uses (hash, sid) VALUES (?, ?)", (key, sid))
        if redone.versions:
            self._forget_values(redone.session_id, sid)
        if redone.entries:
            self._replace_entries(redone, sid)
        self._replace_inbox(redone, sid)
        self._tell(redone, sid)

    def _forget_values(self, session_id: str, sid: int) -> None:
        """Erase the values that no version names any more."""
        named = {key for version in self.versions(session_id) for key in version.values}
        for (key,) in rows_of(self._db, "SELECT hash FROM uses WHERE sid = ?", (sid,)):
            if key not in named:
                self._db.execute("DELETE FROM uses WHERE hash = ? AND sid = ?", (key, sid))
                unused = "DELETE FROM value WHERE hash = ?1 AND NOT EXISTS (SELECT 1 FROM uses WHERE hash = ?1)"
                self._db.execute(unused, (key,))

    def _replace_entries(self, redone: Redone, sid: int) -> None:
        sql = (
            "SELECT batch.rowid, last, count, run.loop, body FROM batch LEFT JOIN run ON run.run = batch.run"
            " WHERE batch.sid = ? ORDER BY last"
        )
        for rowid, last, count, loop, body in rows_of(self._db, sql, (sid,)):
            first = last - count
            if not any(first <= place < last for place in redone.entries):
                continue
            held = packing.unpack_entries(loop, body)
            changed = [redone.entries.get(first + place, entry) for place, entry in enumerate(held)]
            run, packed = packing.pack_entries(prepare_entries(changed))
            crc = batch_checksum(sid, last, Batch(count, run, {}, packed))
            self._db.execute("UPDATE batch SET crc = ?, body = ? WHERE rowid = ?", (crc, packed, rowid))

    def _replace_inbox(self, redone: Redone, sid: int) -> None:
        seqs = [seq for (seq,) in rows_of(self._db, "SELECT seq FROM inbox WHERE sid = ? ORDER BY seq", (sid,))]
        for place, (entry, body) in zip(redone.inbox, prepare_entries(redone.inbox.values()), strict=True):
            crc = entry_checksum(sid, seqs[place], entry.run, entry.kind, body)
            update = "UPDATE inbox SET crc = ?, body = ? WHERE sid = ? AND seq = ?"
            self._db.execute(update, (crc, body, sid, seqs[place]))

    def _tell(self, redone: Redone, sid: int) -> None:
        """Put it on record, and make a version that nobody who has loaded an earlier one can save over."""
        row: Any = first_row(
            self._db,
            "UPDATE session SET evt_end = evt_end + 1, version = version + (claim IS NULL),"
            " updated = iif(claim IS NULL, ?, updated) WHERE sid = ? RETURNING evt_end, version, claim IS NULL",
            (self._at.timestamp(), sid),
        )
        last, version, is_free = row
        write_batch(self._db, sid, last, prepare_batch([redone.told]), (0, 0, 0))
        if is_free:
            *_, newest = self.versions(redone.session_id)
            body = packing.pack(next_version(newest.raw, self._at))
            self._db.execute(
                "INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)",
                (sid, version, checksum(body, sid, version), body),
            )
