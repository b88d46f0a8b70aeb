"""Sessions of a PostgreSQL store given out and taken in whole, in one transaction each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import psycopg

from perdure import codec
from perdure.errors import CorruptRecord, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo
from perdure.protocols import ArchivedSession, Entry, JournalEntry
from perdure.stores.format import packing
from perdure.stores.format.heads import decode_info, unpacked_head
from perdure.stores.format.rows import (
    Batch,
    Stretch,
    Values,
    batch_checksum,
    check_row,
    checksum,
    entry_checksum,
    prepare_batch,
    prepare_entries,
)
from perdure.stores.landing import Landing, require_same, run_stretches
from perdure.stores.moving import MOVED, Material, Owner, Rows, archive, busy
from perdure.stores.postgres_journal import entries_of
from perdure.stores.postgres_link import GATE
from perdure.stores.postgres_reads import unpacked_value
from perdure.stores.postgres_rows import KEY_IS_SOUND, LOG_IS_SOUND, holder_of, plain, require_log, restored

Db = psycopg.Connection[Any]
_ENTRIES_AT_ONCE = 32
_TIME = "coalesce(%s::double precision, extract(epoch FROM clock_timestamp())::double precision)"


def rows_of(db: Db, statement: str, *values: Any) -> list[Any]:
    return db.execute(statement.encode(), values, binary=True).fetchall()


def first_row(db: Db, statement: str, *values: Any) -> Any:
    return db.execute(statement.encode(), values, binary=True).fetchone()


def write_many(db: Db, statement: str, rows: Iterable[Sequence[Any]]) -> None:
    with db.cursor() as cursor:
        cursor.executemany(statement.encode(), rows)


def dump(db: Db, session_id: SessionId, origin: str, at: float | None, alone: bool) -> ArchivedSession:
    asked = f"SELECT sid, claim, expires > {_TIME}, version, msg_end FROM session WHERE id = %s"
    row = first_row(db, asked, at, str(session_id))
    if row is None:
        raise SessionNotFound(session_id)
    sid, claim, stands, version, end = row
    holder = None if claim is None else holder_of(session_id, claim)
    if holder is not None and stands and not holder.is_gone:
        raise busy(session_id, holder.owner)
    logs = PostgresLogs(db, origin)
    keys = read_keys(db, session_id, sid)
    material = Material(
        session_id,
        read_heads(db, session_id, sid),
        lambda key: read_value(db, session_id, key),
        {restored(name): logs.rows(log, 0, None) for log, name in read_logs(db, session_id, sid)},
        _plain(read_record(db, session_id, sid)),
        _plain(read_inbox(db, session_id, sid)),
        keys,
        claim is not None,
        version,
        {**_ends_of_branches(db, session_id, sid), "": end},
    )
    return archive(material, logs, alone=alone)


def _ends_of_branches(db: Db, session_id: str, sid: int) -> dict[str, int]:
    """Return how far the logs of runs go, as the rows of the runs tell."""
    sql = (
        "SELECT run.log, log.name, max(end_pos) FROM run LEFT JOIN log ON log.log = run.log AND log.sid = run.sid"
        " WHERE run.sid = %s GROUP BY run.log, log.name"
    )
    ends: dict[str, int] = {}
    for log, name, end in rows_of(db, sql, sid):
        if name is None:
            raise CorruptRecord(session_id, f"log {log}", "it is missing")
        ends[restored(name)] = end
    return ends


def read_keys(db: Db, session_id: str, sid: int) -> dict[str, tuple[str, int]]:
    """Return the digests and versions of a session's keys, by name."""
    sql = f"SELECT name, digest, version, {KEY_IS_SOUND} FROM key WHERE sid = %s"
    keys: dict[str, tuple[str, int]] = {}
    for name, digest, version, is_sound in rows_of(db, sql, sid):
        if not is_sound:
            raise CorruptRecord(session_id, f"key {restored(name)!r}", "its checksum does not match")
        keys[restored(name)] = (restored(digest), version)
    return keys


def read_logs(db: Db, session_id: str, sid: int) -> list[tuple[int, str]]:
    """Return the numbers and names of a session's logs."""
    rows = rows_of(db, f"SELECT log, name, {LOG_IS_SOUND} FROM log WHERE sid = %s", sid)
    for log, _, is_sound in rows:
        require_log(session_id, log, is_sound)
    return [(log, name) for log, name, _ in rows]


def read_heads(db: Db, session_id: str, sid: int) -> dict[int, bytes]:
    """Every version's head, unpacked."""
    rows = rows_of(db, "SELECT version, crc, body FROM head WHERE sid = %s ORDER BY version", sid)
    return {version: unpacked_head(body, crc, session_id, sid, version) for version, crc, body in rows}


def read_value(db: Db, session_id: str, key: str) -> bytes:
    row = first_row(db, "SELECT body FROM value WHERE hash = %s", key)
    return unpacked_value(session_id, key, None if row is None else row[0])


def read_record(db: Db, session_id: str, sid: int) -> list[JournalEntry]:
    """The whole record; CorruptRecord if an entry of it is missing."""
    found: list[JournalEntry] = []
    rows = rows_of(
        db,
        "SELECT last, count, run.loop, crc, body FROM batch LEFT JOIN run ON run.run = batch.run"
        " WHERE batch.sid = %s ORDER BY last",
        sid,
    )
    for row in rows:
        found += entries_of(session_id, sid, *row)
    (end,) = first_row(db, "SELECT evt_end FROM session WHERE sid = %s", sid)
    if [entry.seq for entry in found] != [*range(1, end + 1)]:
        raise CorruptRecord(session_id, "of its events", f"there should be {end} in order")
    return found


def read_inbox(db: Db, session_id: str, sid: int, *, taken_too: bool = False) -> list[JournalEntry]:
    """The items of the inbox; without those that were taken, unless they are asked for."""
    rows = rows_of(
        db,
        "SELECT seq, inbox.run, kind, crc, body FROM inbox JOIN session ON session.sid = inbox.sid"
        " WHERE inbox.sid = %s AND (%s OR seq > taken) ORDER BY seq",
        sid,
        taken_too,
    )
    found = []
    taken, end = first_row(db, "SELECT taken, inbox_end FROM session WHERE sid = %s", sid)
    if [row[0] for row in rows] != [*range(1 if taken_too else min(taken, end) + 1, end + 1)]:
        raise CorruptRecord(session_id, "of its inbox", f"there should be {end} items in order")
    for seq, run, kind, crc, body in rows:
        entry = Entry(restored(kind), codec.decode_plain(body), None if run is None else restored(run))
        if entry_checksum(sid, seq, entry.run, entry.kind, body) != crc:
            raise CorruptRecord(session_id, f"inbox {seq}", "its checksum does not match")
        found.append(JournalEntry(seq, entry.kind, entry.body, entry.run))
    return found


def _plain(entries: Iterable[JournalEntry]) -> tuple[Entry, ...]:
    return tuple(Entry(entry.kind, entry.body, entry.run) for entry in entries)


class PostgresLogs:
    """The logs of a schema."""

    def __init__(self, db: Db, origin: str) -> None:
        self._db = db
        self.origin = origin

    def owner_of(self, log: int | str) -> Owner | None:
        sql = "SELECT id, name, created FROM log JOIN session ON session.sid = log.sid WHERE log.log = %s"
        row = first_row(self._db, sql, log)
        return None if row is None else Owner(row[0], restored(row[1]), row[2])

    def log_of(self, owner: str, branch: str, created: float) -> int | str | None:
        sql = (
            "SELECT log.log FROM session JOIN log ON log.sid = session.sid"
            " WHERE session.id = %s AND name = %s AND created = %s"
        )
        row = first_row(self._db, sql, owner, plain(branch), created)
        return None if row is None else int(row[0])

    def rows(self, log: int | str, start: int, stop: int | None) -> Rows:
        sql = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s ORDER BY pos"
        found: dict[int, bytes] = {}
        for pos, crc, body in rows_of(self._db, sql, log, start, 2**62 if stop is None else stop):
            check_row(body, crc, None, f"message {pos} of log {log}", int(log), pos)
            found[pos] = body
        return found

    def holds(self, log: int | str, start: int, stop: int) -> bool:
        sql = "SELECT count(*) FROM msg WHERE log = %s AND pos >= %s AND pos < %s"
        return bool(first_row(self._db, sql, log, start, stop) == (stop - start,))


def restore(db: Db, archived: ArchivedSession, origin: str, at: float | None) -> bool:
    # Nobody erases what it is about to link to.
    db.execute("SELECT pg_advisory_xact_lock_shared(%s, hashtext(current_schema()))", (GATE,))
    landing = Landing(archived, PostgresLogs(db, origin))
    info = decode_info(archived.heads[-1], archived.session_id, len(archived.heads))
    sid = _write_session(db, archived, info)
    if sid is None:
        require_same(archived, dump(db, archived.session_id, origin, at, bool(archived.lent)))
        return False
    logs = {branch: _write_log(db, sid, branch, rows) for branch, rows in landing.own.items()}
    db.execute(
        "UPDATE session SET log = %s, msg_end = %s, epoch = sid << 20 WHERE sid = %s",
        (logs[""], max(landing.own[""], default=-1) + 1, sid),
    )
    if archived.interrupted:
        db.execute("INSERT INTO claimed (sid) VALUES (%s)", (sid,))
    write_many(db, "INSERT INTO tag (tag, sid) VALUES (%s, %s)", [(plain(tag), sid) for tag in info.tags])
    for version, (raw, values) in enumerate(landing.heads(logs.__getitem__), 1):
        _write_head(db, sid, version, raw, values)
    _write_refs(db, sid, landing.shown_of_others())
    _write_record(db, sid, archived, logs)
    _write_inbox(db, sid, archived)
    keys = [(sid, plain(name), plain(digest), version) for name, (digest, version) in archived.keys.items()]
    write_many(db, "INSERT INTO key (sid, name, digest, version) VALUES (%s, %s, %s, %s)", keys)
    return True


def _write_session(db: Db, archived: ArchivedSession, info: AgentSessionInfo) -> int | None:
    """The number of the new session; None if there is one of that id."""
    row = first_row(
        db,
        "INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, evt_end, inbox_end,"
        " claim, expires, op) VALUES (%s, 0, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, '')"
        " ON CONFLICT (id) DO NOTHING RETURNING sid",
        str(info.id),
        info.version,
        info.status.value,
        plain(info.agent_name),
        None if info.owner is None else plain(info.owner),
        None if info.parent_id is None else str(info.parent_id),
        info.created_at.timestamp(),
        info.updated_at.timestamp(),
        len(archived.entries),
        len(archived.inbox),
        msgspec.json.encode(MOVED).decode() if archived.interrupted else None,
        0.0 if archived.interrupted else None,
    )
    return None if row is None else int(row[0])


def _write_log(db: Db, sid: int, branch: str, rows: Rows) -> int:
    (log,) = first_row(db, "INSERT INTO log (sid, name) VALUES (%s, %s) RETURNING log", sid, plain(branch))
    numbered = [(log, pos, checksum(rows[pos], log, pos), rows[pos]) for pos in sorted(rows)]
    write_many(db, "INSERT INTO msg (log, pos, crc, body) VALUES (%s, %s, %s, %s)", numbered)
    if rows:
        db.execute("INSERT INTO unindexed (log, start, stop) VALUES (%s, %s, %s)", (log, min(rows), max(rows) + 1))
    return int(log)


def _write_head(db: Db, sid: int, version: int, raw: bytes, values: Values) -> None:
    body = packing.pack(raw)
    db.execute(
        "INSERT INTO head (sid, version, crc, op, hashes, body) VALUES (%s, %s, %s, '', %s::text[], %s)",
        (sid, version, checksum(body, sid, version), [*values], body),
    )
    write_values(db, sid, values)


def write_values(db: Db, sid: int, values: Values) -> None:
    packed = [(key, packing.pack(value)) for key, value in sorted(values.items())]
    write_many(db, "INSERT INTO value (hash, body) VALUES (%s, %s) ON CONFLICT DO NOTHING", packed)
    named = [(key, sid) for key in values]
    write_many(db, "INSERT INTO uses (hash, sid) VALUES (%s, %s) ON CONFLICT DO NOTHING", named)


def _write_refs(db: Db, sid: int, stretches: Iterable[Stretch]) -> None:
    noted = [(log, sid, start, stop) for log, start, stop in stretches]
    write_many(db, "INSERT INTO ref (log, child, start, stop) VALUES (%s, %s, %s, %s)", noted)


def _write_record(db: Db, sid: int, archived: ArchivedSession, logs: dict[str, int]) -> None:
    for start in range(0, len(archived.entries), _ENTRIES_AT_ONCE):
        entries = archived.entries[start : start + _ENTRIES_AT_ONCE]
        write_batch(db, sid, start + len(entries), prepare_batch(entries), logs[""])
    for loop, (branch, start, stop) in run_stretches(archived).items():
        if branch not in logs:
            logs[branch] = _write_log(db, sid, branch, {})
        db.execute(
            "UPDATE run SET log = %s, first_pos = %s, end_pos = %s WHERE sid = %s AND loop = %s",
            (logs[branch], start, stop, sid, plain(loop)),
        )


def write_batch(db: Db, sid: int, last: int, batch: Batch | None, log: int) -> None:
    """Put a batch on record, the last of whose entries has that number."""
    if batch is None:
        return
    numbers: dict[str | None, int] = {}
    for loop, (begin, end) in batch.reach.items():
        first = last - batch.count + 1
        (numbers[loop],) = first_row(
            db,
            "INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos)"
            " VALUES (%s, %s, %s, %s, %s, 0, 0)"
            " ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq RETURNING run",
            *(sid, plain(loop), first + begin, first + end, log),
        )
    db.execute(
        "INSERT INTO batch (sid, last, count, run, crc, body) VALUES (%s, %s, %s, %s, %s, %s)",
        (sid, last, batch.count, numbers.get(batch.run), batch_checksum(sid, last, batch), batch.body),
    )


def _write_inbox(db: Db, sid: int, archived: ArchivedSession) -> None:
    rows = [
        (
            sid,
            seq,
            None if entry.run is None else plain(entry.run),
            plain(entry.kind),
            entry_checksum(sid, seq, entry.run, entry.kind, body),
            body,
        )
        for seq, (entry, body) in enumerate(prepare_entries(archived.inbox), 1)
    ]
    write_many(db, "INSERT INTO inbox (sid, seq, run, kind, crc, op, body) VALUES (%s, %s, %s, %s, %s, '', %s)", rows)
