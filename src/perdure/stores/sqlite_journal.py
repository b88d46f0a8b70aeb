"""The journal's side of the SQLite store: claims, appends, the inbox, and reading the record."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import apsw
import msgspec

from perdure import codec
from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    InvalidData,
    RunInterrupted,
    SessionConflict,
    SessionNotFound,
)
from perdure.model.ids import SessionId
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Entry, JournalEntry, Key, RunOnRecord, StoredAt
from perdure.stores.claims import Holder
from perdure.stores.format.packing import unpack_entries
from perdure.stores.format.rows import LAST, Batch, batch_checksum, entry_checksum
from perdure.stores.sqlite_tables import (
    first_row,
    holder_of,
    new_log,
    require_absent,
    require_gone,
    require_key,
    require_log,
    require_same,
    rows_of,
    write_batch,
    write_messages,
    write_posted,
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
    batch: Batch | None,
    take_over: bool,
) -> tuple[Claim, Appended]:
    row = first_row(db, "SELECT version, epoch, claim, expires FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        raise SessionNotFound(session_id)
    found, epoch, held, expires = row
    if held is not None and expires > at:
        require_gone(session_id, held)
    if held is not None and not take_over:
        raise RunInterrupted(session_id)
    if found != version:
        raise SessionConflict(session_id, version, found)
    db.execute(
        "UPDATE session SET epoch = epoch + 1, claim = ?, expires = ? WHERE id = ?",
        (msgspec.json.encode(holder), at + lease, str(session_id)),
    )
    taken = Claim(session_id, epoch + 1, version, holder.owner, lease)
    return taken, append(db, taken, at, origin, "", rows, batch)


def append(
    db: apsw.Connection,
    claim: Claim,
    at: float,
    origin: str,
    log_name: str,
    rows: Sequence[tuple[str, bytes]],
    batch: Batch | None,
    taken: int = 0,
) -> Appended:
    count = batch.count if batch else 0
    row = first_row(
        db,
        "UPDATE session SET expires = ?, msg_end = msg_end + ?, evt_end = evt_end + ?, taken = max(taken, ?)"
        " WHERE id = ? AND epoch = ? AND claim IS NOT NULL RETURNING sid, log, msg_end, evt_end",
        (at + claim.lease, 0 if log_name else len(rows), count, taken, str(claim.session_id), claim.epoch),
    )
    if row is None:
        raise ClaimLost(claim.session_id, claim.epoch)
    sid, log, msg_end, evt_end = row
    start = msg_end - len(rows)
    if log_name:
        log, start = _branch_log(db, sid, log_name)
    write_messages(db, log, start, [body for _, body in rows])
    write_batch(db, sid, evt_end, batch, (log, start, start + len(rows)))
    ref = LogRef(origin, log)
    return Appended({key: StoredAt(ref, pos) for pos, (key, _) in enumerate(rows, start)}, evt_end)


def _branch_log(db: apsw.Connection, sid: int, name: str) -> tuple[int, int]:
    row = first_row(db, "SELECT log, sid, name, crc FROM log WHERE sid = ? AND name = ?", (sid, name))
    if row is None:
        return new_log(db, sid, name), 0
    require_log(None, *row)
    log = row[0]
    (start,) = first_row(db, "SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE log = ?", (log,))
    return log, start


def heartbeat(db: apsw.Connection, claim: Claim, at: float) -> None:
    db.execute(
        "UPDATE session SET expires = ? WHERE id = ? AND epoch = ? AND claim IS NOT NULL",
        (at + claim.lease, str(claim.session_id), claim.epoch),
    )
    if db.changes() == 0:
        raise ClaimLost(claim.session_id, claim.epoch)


def release(db: apsw.Connection, claim: Claim, interrupted: bool) -> None:
    change = "expires = 0" if interrupted else "claim = NULL, expires = NULL"
    db.execute(
        f"UPDATE session SET {change} WHERE id = ? AND epoch = ? AND claim IS NOT NULL",
        (str(claim.session_id), claim.epoch),
    )


def lapse(db: apsw.Connection, held: Iterable[tuple[SessionId, int]]) -> None:
    """Let claims run out at once: their holders can write no more, and others may recover what they have left."""
    db.executemany(
        "UPDATE session SET expires = 0.0 WHERE id = ? AND epoch = ? AND claim IS NOT NULL",
        [(str(session_id), epoch) for session_id, epoch in held],
    )


def post(db: apsw.Connection, session_id: str, entry: tuple[Entry, bytes]) -> int:
    row = first_row(
        db, "UPDATE session SET inbox_end = inbox_end + 1 WHERE id = ? RETURNING sid, inbox_end", (session_id,)
    )
    if row is None:
        raise SessionNotFound(session_id)
    sid, seq = row
    write_posted(db, sid, seq, *entry)
    return int(seq)


def read_inbox(db: apsw.Connection, session_id: str, after: int) -> list[JournalEntry]:
    """The items of a session's inbox that nobody has taken yet."""
    sid, end, taken = _end_of(db, session_id, "inbox_end", "SELECT max(seq) FROM inbox WHERE sid = session.sid")
    after = min(max(after, taken), end)
    rows = rows_of(
        db, "SELECT seq, run, kind, crc, body FROM inbox WHERE sid = ? AND seq > ? ORDER BY seq", (sid, after)
    )
    for expected, seq in zip_longest(range(after + 1, end + 1), (each[0] for each in rows)):
        if expected != seq:
            raise CorruptRecord(session_id, f"inbox {expected}", "it is missing")
    return [check_posted(session_id, sid, *each) for each in rows]


def check_posted(
    session_id: str, sid: int, seq: int, run: str | None, kind: str, crc: int, body: bytes
) -> JournalEntry:
    """An item of an inbox; CorruptRecord unless its row is what was written."""
    if type(body) is not bytes or entry_checksum(sid, seq, run, kind, body) != crc:
        raise CorruptRecord(session_id, f"inbox {seq}", "its checksum does not match")
    return JournalEntry(seq, kind, codec.decode_plain(body), run)


def read_record(
    db: apsw.Connection,
    session_id: str,
    after: int,
    limit: int | None,
    last: int | None = None,
    run: str | None = None,
) -> list[JournalEntry]:
    """Entries of a session's record, in order. Batches are read whole, and cut to what was asked for."""
    sid, end, _ = _end_of(db, session_id, "evt_end", "SELECT max(last) FROM batch WHERE sid = session.sid")
    first, final = min(after, end) + 1, end
    if run is not None:
        reach = _reach_of(db, session_id, sid, run)
        first, final = max(first, reach[0]), min(final, reach[1])
    elif last is not None:
        first = max(first, end - last + 1)
    elif limit is not None:
        final = min(final, first + limit - 1)
    found = _read_batches(db, session_id, sid, first, final)
    if run is not None and found:
        ends = [entry for entry in (found[0], found[-1]) if entry.seq in reach]
        _require_ends(session_id, run, *ends)
    return cut(found, limit, last, run)


def _reach_of(db: apsw.Connection, session_id: str, sid: int, run: str) -> tuple[int, int]:
    """The first and the last of a run's entries, 1 and 0 if there is none; CorruptRecord if an index has lost it."""
    row = first_row(db, "SELECT first_seq, last_seq FROM run WHERE sid = ? AND loop = ?", (sid, run))
    if row is not None:
        return int(row[0]), int(row[1])
    again = "SELECT 1 FROM run INDEXED BY run_by_session WHERE sid = ? AND +loop = ?"
    if first_row(db, again, (sid, run)):
        raise CorruptRecord(session_id, f"run {run}", "the index of runs does not find it")
    return 1, 0


def _require_ends(session_id: str, run: str, *ends: JournalEntry) -> None:
    """Raise CorruptRecord if what is noted as a run's first or last entry is not of that run."""
    if any(entry.run != run for entry in ends):
        raise CorruptRecord(session_id, f"run {run}", "its record does not begin and end where it is noted to")


def cut(entries: list[JournalEntry], limit: int | None, last: int | None, run: str | None) -> list[JournalEntry]:
    """Of entries in order those of one run, and of these the first or the last so many."""
    chosen = entries if run is None else [entry for entry in entries if entry.run == run]
    return chosen[:limit] if last is None else chosen[max(0, len(chosen) - last) :]


def _end_of(db: apsw.Connection, session_id: str, end: str, newest: str) -> tuple[int, int, int]:
    """A session's number, where its record or inbox ends, and how far the inbox is taken."""
    row = first_row(
        db,
        f"SELECT sid, {end}, taken, (SELECT coalesce(({newest}), 0)),"
        " (SELECT id FROM session AS same WHERE same.sid = session.sid) FROM session WHERE id = ?",
        (session_id,),
    )
    if row is None:
        require_absent(db, session_id)
        raise SessionNotFound(session_id)
    sid, noted, taken, found, same = row
    require_same(same, session_id)
    if noted != found:
        table = end.removesuffix("_end").replace("evt", "event")
        raise CorruptRecord(session_id, f"{table} {noted}", f"it should be the last one, and {found} is")
    return sid, noted, taken


def _read_batches(db: apsw.Connection, session_id: str, sid: int, first: int, final: int) -> list[JournalEntry]:
    """The entries from one number to another; CorruptRecord if one of them is missing."""
    if first > final:
        return []
    found: list[JournalEntry] = []
    (bound,) = first_row(db, "SELECT min(last) FROM batch WHERE sid = ? AND last >= ?", (sid, final))
    rows = rows_of(
        db,
        "SELECT last, count, run.loop, crc, body FROM batch LEFT JOIN run ON run.run = batch.run"
        " WHERE batch.sid = ? AND last BETWEEN ? AND ? ORDER BY last",
        (sid, first, LAST if bound is None else bound),
    )
    for row in rows:
        found += _entries_of(session_id, sid, *row)
    wanted = [entry for entry in found if first <= entry.seq <= final]
    for expected, entry in zip_longest(range(first, final + 1), wanted):
        if entry is None or entry.seq != expected:
            raise CorruptRecord(session_id, f"event {expected}", "it is missing")
    return wanted


def _entries_of(
    session_id: str, sid: int, last: int, count: int, run: str | None, crc: int, body: bytes
) -> list[JournalEntry]:
    where = f"event {last}"
    if type(body) is not bytes or batch_checksum(sid, last, Batch(count, run, {}, body)) != crc:
        raise CorruptRecord(session_id, where, "its checksum does not match")
    try:
        entries = unpack_entries(run, body)
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None
    if len(entries) != count:
        raise CorruptRecord(session_id, where, f"its batch should hold {count} entries, and holds {len(entries)}")
    return [JournalEntry(seq, each.kind, each.body, each.run) for seq, each in enumerate(entries, last - count + 1)]


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
        _require_ends(session_id, loop, first, last)
        found.append(RunOnRecord(loop, first, last, LogRef(origin, log), start, stop))
    return found


def _entry_at(db: apsw.Connection, session_id: str, sid: int, seq: int) -> JournalEntry:
    (entry,) = _read_batches(db, session_id, sid, seq, seq)
    return entry


def log_of(db: apsw.Connection, session_id: str, name: str, origin: str) -> tuple[LogRef, int]:
    sql = (
        "SELECT (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = log.log), log.log, log.sid, log.name, crc"
        " FROM session LEFT JOIN log ON log.sid = session.sid AND log.name = ? WHERE session.id = ?"
    )
    row = first_row(db, sql, (name, session_id))
    if row is None or row[1] is None:
        raise SessionNotFound(session_id if row is None else f"{session_id}/{name}")
    end, *of_log = row
    require_log(session_id, *of_log)
    return LogRef(origin, of_log[0]), end


def lapsed(db: apsw.Connection, at: float) -> list[SessionId]:
    rows = rows_of(db, "SELECT id, claim, expires FROM session WHERE claim IS NOT NULL ORDER BY sid", ())
    return [SessionId(key) for key, claim, expires in rows if expires <= at or holder_of(key, claim).is_gone]


def find_key(db: apsw.Connection, session_id: str, name: str) -> tuple[Key, int] | None:
    sql = (
        "SELECT session.sid, key.name, key.digest, key.version, key.crc FROM session"
        " LEFT JOIN key ON key.sid = session.sid AND key.name = ?2 WHERE session.id = ?1"
    )
    row = first_row(db, sql, (session_id, name))
    if row is None:
        return None
    sid, found, digest, version, crc = row
    if found is not None:
        require_key(session_id, sid, found, digest, version, crc)
        return Key(name, digest), version
    # From the index alone, which has a name of its own.
    again = "SELECT 1 FROM key INDEXED BY key_again WHERE sid = ?1 AND substr(name, -4) = substr(?2, -4) AND name = ?2"
    if first_row(db, again, (sid, name)):
        raise CorruptRecord(session_id, f"key {name!r}", "it is noted, and its row is missing or has another name")
    return None


def is_claimed(db: apsw.Connection, session_id: str, at: float) -> bool:
    row = first_row(db, "SELECT claim, expires FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    claim, expires = row
    return claim is not None and expires > at and not holder_of(session_id, claim).is_gone


def is_interrupted(db: apsw.Connection, session_id: str, at: float) -> bool:
    row = first_row(db, "SELECT claim, expires FROM session WHERE id = ? AND claim IS NOT NULL", (session_id,))
    return row is not None and (row[1] <= at or holder_of(session_id, row[0]).is_gone)
