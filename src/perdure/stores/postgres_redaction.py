"""Replacing what was said in a PostgreSQL store for good, and clearing up what nobody shows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from functools import partial

from perdure.errors import CorruptRecord, SessionNotFound
from perdure.protocols import Entry
from perdure.stores import redaction
from perdure.stores.format import packing
from perdure.stores.format.heads import StoredHead
from perdure.stores.format.rows import (
    Batch,
    batch_checksum,
    check_row,
    checksum,
    entry_checksum,
    prepare_batch,
    prepare_entries,
)
from perdure.stores.postgres_archive import (
    Db,
    first_row,
    read_heads,
    read_inbox,
    read_record,
    read_value,
    rows_of,
    write_batch,
    write_values,
)
from perdure.stores.postgres_link import GATE
from perdure.stores.postgres_rows import require_gone, restored
from perdure.stores.postgres_words import forget
from perdure.stores.redaction import Log, Places, Redone, Request, Row, Version, next_version

_ALONE = "SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))"
_ORPHANS = """
    DELETE FROM msg USING log
    WHERE log.log = msg.log AND NOT EXISTS (SELECT 1 FROM session WHERE session.sid = log.sid)
        AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.log = msg.log AND ref.start <= msg.pos AND msg.pos < ref.stop)
    RETURNING 1
"""
_EMPTY = """
    DELETE FROM log WHERE NOT EXISTS (SELECT 1 FROM session WHERE session.sid = log.sid)
        AND NOT EXISTS (SELECT 1 FROM ref WHERE ref.log = log.log)
"""
_UNUSED = "DELETE FROM value WHERE NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash) RETURNING 1"


def gc(db: Db) -> int:
    """Erase what is left of erased sessions and shown by nobody; how many messages that were."""
    db.execute(_ALONE, (GATE,))
    messages, values = len(rows_of(db, _ORPHANS)), len(rows_of(db, _UNUSED))
    db.execute(_EMPTY)
    if messages or values:
        db.execute("UPDATE meta SET erasures = erasures + 1")
    return messages


def redact(db: Db, request: Request, at: datetime, time: float | None) -> int:
    """Replace the content of messages; how many were not replaced before."""
    # The session first and the gate then, as a save does it; whoever else is concerned is locked when it is known.
    if first_row(db, "SELECT 1 FROM session WHERE id = %s FOR UPDATE", str(request.session_id)) is None:
        raise SessionNotFound(request.session_id)
    db.execute(_ALONE, (GATE,))
    replaced = redaction.redact(_Bench(db, at, time), request, at)
    db.execute("UPDATE meta SET erasures = erasures + 1")
    return replaced


class _Bench:
    """The rows of a schema, inside a transaction that writes."""

    def __init__(self, db: Db, at: datetime, time: float | None) -> None:
        self._db = db
        self._at = at
        self._time = time
        self._values: dict[str, bytes] = {}

    def history(self, session_id: str) -> Iterator[Row]:
        stretches = rows_of(
            self._db,
            "SELECT log, 0, %s FROM log WHERE sid = %s UNION SELECT log, start, stop FROM ref WHERE child = %s",
            *(2**62, sid := self._sid(session_id), sid),
        )
        sql = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s ORDER BY pos"
        for log, start, stop in stretches:
            for pos, crc, body in rows_of(self._db, sql, log, start, stop):
                check_row(body, crc, session_id, f"message {pos} of log {log}", log, pos)
                yield Row(log, pos, body)

    def _sid(self, session_id: str) -> int:
        row = first_row(self._db, "SELECT sid FROM session WHERE id = %s", str(session_id))
        if row is None:
            raise SessionNotFound(session_id)
        return int(row[0])

    def row(self, log: Log, position: int) -> bytes:
        row = first_row(self._db, "SELECT crc, body FROM msg WHERE log = %s AND pos = %s", log, position)
        if row is None:
            raise CorruptRecord(None, f"message {position} of log {log}", "it is missing")
        check_row(row[1], row[0], None, f"message {position} of log {log}", int(log), position)
        return bytes(row[1])

    def concerned(self, places: Places) -> Collection[str]:
        found: dict[str, None] = {}
        for log, positions in places.items():
            owner = "SELECT id FROM log JOIN session ON session.sid = log.sid WHERE log.log = %s"
            found |= {key: None for (key,) in rows_of(self._db, owner, log)}
            shown = "SELECT id, start, stop FROM ref JOIN session ON session.sid = ref.child WHERE ref.log = %s"
            for key, start, stop in rows_of(self._db, shown, log):
                if any(start <= position < stop for position in positions):
                    found[key] = None
        todo = list(found)
        while todo:
            forks = [key for (key,) in rows_of(self._db, "SELECT id FROM session WHERE parent = %s", todo.pop())]
            todo += [key for key in forks if key not in found]
            found |= dict.fromkeys(forks)
        return found

    def require_free(self, session_id: str) -> None:
        claim, stands = first_row(
            self._db,
            "SELECT claim, expires > coalesce(%s::double precision,"
            " extract(epoch FROM clock_timestamp())::double precision) FROM session WHERE id = %s FOR UPDATE",
            *(self._time, session_id),
        )
        if claim is not None and stands:
            require_gone(session_id, claim)

    def versions(self, session_id: str) -> Iterator[Version]:
        for version, raw in read_heads(self._db, session_id, self._sid(session_id)).items():
            values = StoredHead(raw, session_id, version).gathered(partial(self._value, session_id))
            yield Version(version, raw, values)

    def _value(self, session_id: str, key: str) -> bytes:
        if key not in self._values:
            self._values[key] = read_value(self._db, session_id, key)
        return self._values[key]

    def entries(self, session_id: str) -> list[Entry]:
        found = read_record(self._db, session_id, self._sid(session_id))
        return [Entry(each.kind, each.body, each.run) for each in found]

    def inbox(self, session_id: str) -> list[Entry]:
        found = read_inbox(self._db, session_id, self._sid(session_id), taken_too=True)
        return [Entry(each.kind, each.body, each.run) for each in found]

    def replace(self, rows: Sequence[Row], sessions: Sequence[Redone]) -> None:
        for row in rows:
            crc = checksum(row.body, int(row.log), row.position)
            update = "UPDATE msg SET crc = %s, body = %s WHERE log = %s AND pos = %s"
            self._db.execute(update, (crc, row.body, row.log, row.position))
            forget(self._db, int(row.log), row.position)
        for redone in sessions:
            self._replace_session(redone, self._sid(redone.session_id))

    def _replace_session(self, redone: Redone, sid: int) -> None:
        for version in redone.versions:
            body = packing.pack(version.raw)
            self._db.execute(
                "UPDATE head SET crc = %s, body = %s, hashes = %s::text[] WHERE sid = %s AND version = %s",
                (checksum(body, sid, version.number), body, [*version.values], sid, version.number),
            )
            write_values(self._db, sid, dict(version.values))
        if redone.versions:
            self._forget_values(redone.session_id, sid)
        if redone.entries:
            self._replace_entries(redone, sid)
        self._replace_inbox(redone, sid)
        self._tell(redone, sid)

    def _forget_values(self, session_id: str, sid: int) -> None:
        """Erase the values that no version names any more."""
        named = [*{key for version in self.versions(session_id) for key in version.values}]
        gone = "DELETE FROM uses WHERE sid = %s AND hash <> ALL (%s) RETURNING hash"
        hashes = [key for (key,) in rows_of(self._db, gone, sid, named)]
        unused = (
            "DELETE FROM value WHERE hash = ANY (%s) AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash)"
        )
        self._db.execute(unused, (hashes,))

    def _replace_entries(self, redone: Redone, sid: int) -> None:
        sql = (
            "SELECT last, count, run.loop, body FROM batch LEFT JOIN run ON run.run = batch.run"
            " WHERE batch.sid = %s ORDER BY last"
        )
        for last, count, loop, body in rows_of(self._db, sql, sid):
            first = last - count
            if not any(first <= place < last for place in redone.entries):
                continue
            held = packing.unpack_entries(None if loop is None else restored(loop), body)
            changed = [redone.entries.get(first + place, entry) for place, entry in enumerate(held)]
            run, packed = packing.pack_entries(prepare_entries(changed))
            crc = batch_checksum(sid, last, Batch(count, run, {}, packed))
            update = "UPDATE batch SET crc = %s, body = %s WHERE sid = %s AND last = %s"
            self._db.execute(update, (crc, packed, sid, last))

    def _replace_inbox(self, redone: Redone, sid: int) -> None:
        seqs = [seq for (seq,) in rows_of(self._db, "SELECT seq FROM inbox WHERE sid = %s ORDER BY seq", sid)]
        for place, (entry, body) in zip(redone.inbox, prepare_entries(redone.inbox.values()), strict=True):
            crc = entry_checksum(sid, seqs[place], entry.run, entry.kind, body)
            update = "UPDATE inbox SET crc = %s, body = %s WHERE sid = %s AND seq = %s"
            self._db.execute(update, (crc, body, sid, seqs[place]))

    def _tell(self, redone: Redone, sid: int) -> None:
        """Put it on record, and make a version that nobody who has loaded an earlier one can save over."""
        last, version, log, is_free = first_row(
            self._db,
            "UPDATE session SET evt_end = evt_end + 1, version = version + CASE WHEN claim IS NULL THEN 1 ELSE 0 END,"
            " updated = CASE WHEN claim IS NULL THEN %s ELSE updated END"
            " WHERE sid = %s RETURNING evt_end, version, log, claim IS NULL",
            *(self._at.timestamp(), sid),
        )
        write_batch(self._db, sid, last, prepare_batch([redone.told]), log)
        if is_free:
            *_, newest = self.versions(redone.session_id)
            body = packing.pack(next_version(newest.raw, self._at))
            self._db.execute(
                "INSERT INTO head (sid, version, crc, op, hashes, body) VALUES (%s, %s, %s, '', %s::text[], %s)",
                (sid, version, checksum(body, sid, version), [*newest.values], body),
            )
