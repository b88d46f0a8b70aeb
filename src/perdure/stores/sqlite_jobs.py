"""What the SQLite store does inside a transaction: plain functions on a connection, run by a worker's thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import count, islice, pairwise, repeat, zip_longest
from typing import Any
from zlib import crc32

import apsw
import msgspec

from perdure import codec
from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    InvalidData,
    SessionBusy,
    SessionConflict,
    SessionNotFound,
    StoreError,
)
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.model.transcript import LogRef
from perdure.protocols import Appended, Claim, Entry, JournalEntry, Key, RunOnRecord, SessionQuery, StoredAt
from perdure.stores.claims import Holder
from perdure.stores.live import Live
from perdure.stores.memory import matches
from perdure.stores.rows import (
    Placement,
    Shelf,
    StoredHead,
    Stretch,
    another_session,
    check_row,
    checksum,
    decode_info,
    encode_head,
    foreign_stretches,
    hash_of,
    seed_of,
)


class Write(msgspec.Struct, frozen=True):
    """A save or a create, ready for the writer: everything that could be done before the transaction is."""

    session: AgentSession
    placement: Placement
    at: datetime
    op: str
    origin: str
    live: Live | None = None
    claim: Claim | None = None
    entries: Sequence[tuple[Entry, bytes]] = ()
    taken: int = 0
    key: Key | None = None


def prepare_entries(entries: Iterable[Entry]) -> list[tuple[Entry, bytes]]:
    """Entries with their bytes; InvalidData before anything is written."""
    prepared = []
    for entry in entries:
        codec.check_text(f"{entry.kind}/{entry.run}", "$.kind")
        prepared.append((entry, codec.encode_json(entry.body, f"$.{entry.kind}")))
    return prepared


def create(db: apsw.Connection, write: Write) -> Live:
    info = write.session.info
    found = _row(db, "SELECT version FROM session WHERE id = ?", (info.id,))
    if found is not None:
        raise SessionConflict(info.id, 0, found[0])
    _require_absent(db, info.id)
    db.execute(
        "INSERT INTO session (id, log, version, status, agent, owner, parent, created, updated, msg_end)"
        " VALUES (?, 0, 1, ?, ?, ?, ?, ?, ?, ?)",
        (
            str(info.id),
            info.status.value,
            info.agent_name,
            info.owner,
            None if info.parent_id is None else str(info.parent_id),
            info.created_at.timestamp(),
            write.at.timestamp(),
            len(write.placement.new),
        ),
    )
    sid = db.last_insert_rowid()
    db.execute("INSERT INTO log (sid) VALUES (?)", (sid,))
    log = db.last_insert_rowid()
    # A session's number is never used twice: a claim on an erased session is none on its successor of the same id.
    db.execute("UPDATE session SET log = ?, epoch = ? WHERE sid = ?", (log, sid << 20, sid))
    _write_tags(db, sid, info.tags)
    return _write_version(db, write, sid, log, 0, None, _erasures(db))


_CAS = """
    UPDATE session SET version = version + 1, status = ?, agent = ?, updated = ?, msg_end = msg_end + ?,
        evt_end = evt_end + ?, taken = max(taken, ?), claim = NULL, expires = NULL
    WHERE id = ? AND version = ? AND created = ? AND {claim}
    RETURNING sid, log, msg_end, evt_end, (SELECT value FROM meta WHERE key = 'erasures')
"""
_CAS_FREE = _CAS.format(claim="(claim IS NULL OR expires <= ?)")
_CAS_CLAIMED = _CAS.format(claim="claim IS NOT NULL AND epoch = ?")


def save(db: apsw.Connection, write: Write) -> Live:
    info, claim = write.session.info, write.claim
    row = _row(
        db,
        _CAS_FREE if claim is None else _CAS_CLAIMED,
        (
            info.status.value,
            info.agent_name,
            write.at.timestamp(),
            len(write.placement.new),
            len(write.entries),
            write.taken,
            str(info.id),
            info.version,
            info.created_at.timestamp(),
            write.at.timestamp() if claim is None else claim.epoch,
        ),
    )
    if row is None:
        _forget_lost_claim(db, write.session, claim)
        return save(db, write)
    sid, log, msg_end, evt_end, erasures = row
    live = write.live if write.live is not None and write.live.erasures == erasures else None
    if live is None or live.session.info.tags != info.tags:
        db.execute("DELETE FROM tag WHERE sid = ?", (sid,))
        _write_tags(db, sid, info.tags)
    stretch = (log, msg_end - len(write.placement.new), msg_end)
    _write_entries(db, "event", sid, evt_end - len(write.entries), write.entries, stretch)
    if write.key is not None:
        db.execute(
            "INSERT OR REPLACE INTO key (sid, name, digest, version) VALUES (?, ?, ?, ?)",
            (sid, write.key.name, write.key.digest, info.version + 1),
        )
    return _write_version(db, write, sid, log, msg_end - len(write.placement.new), live, erasures)


def _forget_lost_claim(db: apsw.Connection, session: AgentSession, claim: Claim | None) -> None:
    """Say why a save was refused; or, if only a dead process's claim stood in its way, take that claim away."""
    session_id, version = session.id, session.version
    row = _row(db, "SELECT version, created, epoch, claim FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        raise SessionNotFound(session_id)
    found, created, epoch, holder = row
    if claim is not None and (holder is None or epoch != claim.epoch):
        raise ClaimLost(session_id, claim.epoch)
    if claim is None and holder is not None:
        _require_gone(session_id, holder)
    if found != version:
        raise SessionConflict(session_id, version, found)
    if created != session.info.created_at.timestamp():
        raise another_session(session)
    db.execute("UPDATE session SET claim = NULL, expires = NULL WHERE id = ?", (str(session_id),))


def _holder(session_id: str, raw: bytes) -> Holder:
    try:
        return msgspec.json.decode(raw, type=Holder)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(session_id, "claim", str(error)) from None


def _require_gone(session_id: str, raw: bytes) -> None:
    holder = _holder(session_id, raw)
    if not holder.is_gone:
        raise SessionBusy(session_id, holder.owner)


def _write_tags(db: apsw.Connection, sid: int, tags: Iterable[str]) -> None:
    if tags:
        db.executemany("INSERT INTO tag (tag, sid) VALUES (?, ?)", [(tag, sid) for tag in tags])


def _write_version(
    db: apsw.Connection, write: Write, sid: int, log: int, start: int, live: Live | None, erasures: int
) -> Live:
    own = LogRef(write.origin, log)
    settled = write.placement.settle(own, start)
    version = write.session.version + 1
    kept = AgentSession.reconstitute(settled, version=version, updated_at=write.at)
    _write_messages(db, log, start, write.placement.new)
    body, values = encode_head(kept, write.op)
    db.execute(
        "INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)",
        (sid, version, checksum(body, sid, version), body),
    )
    known = live.hashes if live else frozenset()
    for key in values.keys() - known:
        db.execute("INSERT OR IGNORE INTO value (hash, body) VALUES (?, ?)", (key, values[key]))
        db.execute("INSERT OR IGNORE INTO uses (hash, sid) VALUES (?, ?)", (key, sid))
    refs = live.refs if live else frozenset()
    named = foreign_stretches(kept, own)
    for stretch in named - refs:
        _write_ref(db, kept.info, sid, stretch)
    return Live(kept, erasures, frozenset(values), frozenset(named))


def _write_messages(db: apsw.Connection, log: int, start: int, rows: Sequence[bytes]) -> None:
    if rows:
        sums = map(crc32, rows, count(seed_of(log) + start))
        numbered = zip(repeat(log), count(start), sums, rows, strict=False)
        db.executemany("INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)", numbered)


def _write_ref(db: apsw.Connection, info: AgentSessionInfo, sid: int, stretch: Stretch) -> None:
    """Note that a session shows part of another's log, unless it is noted; SessionNotFound if that is erased."""
    log, start, stop = stretch
    noted = "SELECT 1 FROM ref WHERE child = ? AND log = ? AND start <= ? AND stop >= ?"
    if _row(db, noted, (sid, log, start, stop)):
        return
    owner = _row(db, "SELECT session.sid FROM log JOIN session USING (sid) WHERE log.log = ?", (log,))
    if owner == (sid,):
        return
    if owner is None:
        count = "SELECT count(*) FROM msg WHERE log = ? AND pos >= ? AND pos < ?"
        if _row(db, count, (log, start, stop)) != (stop - start,):
            raise SessionNotFound(info.parent_id or f"log {log}")
    db.execute("INSERT INTO ref (log, child, start, stop) VALUES (?, ?, ?, ?)", (log, sid, start, stop))


def _erasures(db: apsw.Connection) -> int:
    return int(meta(db, "erasures"))


def meta(db: apsw.Connection, key: str) -> Any:
    """Something that the file says of itself."""
    found = _row(db, "SELECT value FROM meta WHERE key = ?", (key,))
    if found is None:
        raise CorruptRecord(None, f"meta {key}", "it is missing")
    return found[0]


def _row(db: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> Any:
    """The first row, or None."""
    return db.execute(sql, bindings).fetchone()


def _rows(db: apsw.Connection, sql: str, bindings: tuple[Any, ...]) -> list[Any]:
    return db.execute(sql, bindings).fetchall()


LAST = 2**63 - 1
_PEEK = "SELECT version, (SELECT value FROM meta WHERE key = 'erasures') FROM session WHERE id = ?"


def peek(db: apsw.Connection, session_id: str) -> tuple[int, int] | None:
    """A session's version, and how much has been erased so far."""
    found: tuple[int, int] | None = _row(db, _PEEK, (str(session_id),))
    if found is None:
        _require_absent(db, session_id)
    return found


def _require_same(found: str, session_id: str) -> None:
    """Raise CorruptRecord if the row that an index leads to is another's."""
    if found != session_id:
        raise CorruptRecord(session_id, "in the index of ids", f"it leads to {found!r}")


def _require_absent(db: apsw.Connection, session_id: str) -> None:
    """Raise CorruptRecord if a session that was not found is there all the same."""
    again = "SELECT 1 FROM session INDEXED BY session_again WHERE substr(id, -4) = substr(?1, -4) AND +id = ?1"
    if _row(db, again, (str(session_id),)) is not None:
        raise CorruptRecord(session_id, "in the index of ids", "it is missing or leads elsewhere")


class Loaded(msgspec.Struct, frozen=True):
    """What a load has read, to be put together in the caller's thread, where the tapes are."""

    head: StoredHead
    values: dict[str, bytes]
    fetched: list[tuple[int, int, list[Message]]]
    erasures: int


def load(
    db: apsw.Connection, session_id: str, version: int | None, shelf: Shelf, cached: dict[str, bytes]
) -> Loaded | None:
    row = _row(
        db,
        "SELECT session.sid, session.version, (SELECT max(version) FROM head WHERE head.sid = session.sid),"
        " head.version, head.crc, head.body, (SELECT id FROM session AS same WHERE same.sid = session.sid)"
        " FROM session LEFT JOIN head"
        " ON head.sid = session.sid AND head.version = coalesce(?, session.version) WHERE session.id = ?",
        (version, session_id),
    )
    if row is None:
        _require_absent(db, session_id)
        return None
    _require_same(row[6], session_id)
    sid, newest, last, found, crc, body, _ = row
    if version is None and not newest == last == found:
        raise CorruptRecord(session_id, f"head {newest}", f"it should be the last one, and head {last} is")
    if found is None:
        if version is not None and version > max(newest, last or 0):
            return None
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    check_row(body, crc, session_id, f"head {found}", sid, found)
    head = StoredHead(body, session_id, found)
    values = {key: cached.get(key) or read_value(db, session_id, key) for key in head.hashes()}
    missing = shelf.missing(head.wanted(values))
    fetched = [(int(log), start, read_messages(db, session_id, int(log), start, stop)) for log, start, stop in missing]
    return Loaded(head, values, fetched, _erasures(db))


def read_value(db: apsw.Connection, session_id: str, key: str) -> bytes:
    row = _row(db, "SELECT body FROM value WHERE hash = ?", (key,))
    if row is None or type(row[0]) is not bytes or hash_of(row[0]) != key:
        raise CorruptRecord(session_id, f"value {key}", "it is missing" if row is None else "its hash does not match")
    return bytes(row[0])


def read_messages(db: apsw.Connection, session_id: str | None, log: int, start: int, stop: int) -> list[Message]:
    cursor = db.execute(
        "SELECT pos, crc, body FROM msg WHERE log = ? AND pos >= ? AND pos < ? ORDER BY pos", (log, start, stop)
    )
    messages: list[Message] = []
    while rows := list(islice(cursor, _ROWS_AT_ONCE)):
        messages += _decoded(session_id, log, start + len(messages), rows)
    if len(messages) != stop - start:
        raise CorruptRecord(session_id, f"message {start + len(messages)} of log {log}", "it is missing")
    return messages


# Enough to look at them all at once, which is quicker than one by one; few enough to stay in the processor's cache.
_ROWS_AT_ONCE = 128


def _decoded(session_id: str | None, log: int, start: int, rows: Sequence[Any]) -> list[Message]:
    positions, sums, bodies = zip(*rows, strict=True)
    stop, seed = start + len(rows), seed_of(log)
    if positions != tuple(range(start, stop)) or sums != tuple(map(crc32, bodies, range(seed + start, seed + stop))):
        raise _damage(session_id, log, start, rows)
    try:
        return codec.decode_messages(bodies)
    except InvalidData as error:
        raise CorruptRecord(session_id, f"a message from {start} on in log {log}", str(error)) from None


def _damage(session_id: str | None, log: int, start: int, rows: Sequence[Any]) -> CorruptRecord:
    """What is wrong with the first row that is not what it should be."""
    for expected, (pos, crc, body) in enumerate(rows, start):
        if pos != expected:
            return CorruptRecord(session_id, f"message {expected} of log {log}", "it is missing")
        if checksum(body, log, pos) != crc:
            return CorruptRecord(session_id, f"message {pos} of log {log}", "its checksum does not match")
    raise AssertionError("it is called where something is wrong")


def read_log(db: apsw.Connection, log: int, start: int, stop: int) -> list[Message]:
    """Messages of a log, whoever shows them; SessionNotFound if it does not reach there, or does no longer."""
    count, end, owned = _row(
        db,
        "SELECT (SELECT count(*) FROM msg WHERE log = ?1 AND pos >= ?2 AND pos < ?3),"
        " (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE log = ?1),"
        " EXISTS (SELECT 1 FROM log JOIN session USING (sid) WHERE log.log = ?1)",
        (log, start, stop),
    )
    if count < stop - start and (not owned or end < stop):
        raise SessionNotFound(f"log {log}")
    return read_messages(db, None, log, start, stop)


def list_sessions(db: apsw.Connection, query: SessionQuery) -> SessionInfoList:
    where, values = _conditions(query)
    rows = _rows(
        db,
        "SELECT session.sid, CAST(session.id AS BLOB), session.version, CAST(session.status AS BLOB), head.crc,"
        " head.body FROM session"
        " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
        f" WHERE {' AND '.join(where)} ORDER BY session.sid DESC LIMIT ?",
        (*values, query.limit + 1),
    )
    if any(newer[0] <= older[0] for newer, older in pairwise(rows)):
        raise CorruptRecord(None, "of the session table", "its rows are out of order")
    infos: list[AgentSessionInfo] = []
    damaged: list[CorruptRecord] = []
    for row in rows[: query.limit]:
        try:
            infos.append(_info_of(query, *row))
        except CorruptRecord as error:
            damaged.append(error)
    more = str(rows[query.limit - 1][0]) if len(rows) > query.limit else None
    return SessionInfoList(infos, next=more, damaged=damaged)


def _info_of(
    query: SessionQuery, sid: int, raw_id: bytes, version: int, status: bytes, crc: int | None, body: bytes | None
) -> AgentSessionInfo:
    session_id = raw_id.decode(errors="replace")
    if crc is None or body is None:
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    check_row(body, crc, session_id, f"head {version}", sid, version)
    info = decode_info(body, session_id, version)
    if (info.id, info.version, info.status.value.encode()) != (session_id, version, status) or not matches(info, query):
        raise CorruptRecord(session_id, "header", "it does not agree with its head")
    return info


def _conditions(query: SessionQuery) -> tuple[list[str], list[Any]]:
    """SQL conditions and their values; every value is bound."""
    given: list[tuple[str, Any]] = [
        ("session.id = ?", query.id),
        ("session.agent = ?", query.agent),
        ("session.status = ?", query.status.value if query.status else None),
        ("session.owner = ?", query.owner),
        ("session.parent = ?", query.parent),
        ("EXISTS (SELECT 1 FROM tag WHERE tag.tag = ? AND tag.sid = session.sid)", query.tag),
        ("session.created > ?", query.created_after),
        ("session.created < ?", query.created_before),
        ("session.updated > ?", query.updated_after),
        ("session.updated < ?", query.updated_before),
        ("session.sid < ?", page_start(query.after)),
    ]
    asked = [(sql, value) for sql, value in given if value is not None]
    where = [sql for sql, _ in asked]
    if query.status not in (None, SessionStatus.ACTIVE):
        where.append("session.status <> 'active'")  # what the index on the others says of itself
    if not query.shows_deleted:
        where.append(f"session.status <> '{SessionStatus.DELETED.value}'")
    values = [value.timestamp() if isinstance(value, datetime) else value for _, value in asked]
    return where or ["1"], values


def page_start(after: str | None) -> int | None:
    """The number that a page's `next` stands for."""
    if after is None:
        return None
    if not after.isdecimal() or len(after) > 18:
        raise InvalidData("$.after", f"{after!r} is not a page's `next`")
    return int(after)


def delete(db: apsw.Connection, session_id: str, at: float) -> None:
    """Erase a session, but for those of its messages that another session's versions show."""
    row = _row(db, "SELECT sid, claim, expires FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    sid, claim, expires = row
    if claim is not None and expires > at:
        _require_gone(session_id, claim)
    shown = [log for (log,) in db.execute("SELECT DISTINCT log FROM ref WHERE child = ?", (sid,))]
    own = [log for (log,) in db.execute("SELECT log FROM log WHERE sid = ?", (sid,))]
    hashes = [key for (key,) in db.execute("SELECT hash FROM uses WHERE sid = ?", (sid,))]
    db.execute("DELETE FROM ref WHERE child = ?", (sid,))
    for table in ("head", "event", "run", "inbox", "key", "tag", "uses", "session"):
        db.execute(f"DELETE FROM {table} WHERE sid = ?", (sid,))
    for log in {*own, *shown}:
        _erase_unshown(db, log)
    for key in hashes:
        db.execute("DELETE FROM value WHERE hash = ?1 AND NOT EXISTS (SELECT 1 FROM uses WHERE hash = ?1)", (key,))
    count_erasure(db)


def count_erasure(db: apsw.Connection) -> None:
    """Let everybody know that what they have at hand may have been erased."""
    db.execute("UPDATE meta SET value = value + 1 WHERE key = 'erasures'")


def _erase_unshown(db: apsw.Connection, log: int) -> None:
    """Erase what nobody shows of a log whose session is gone."""
    if _row(db, "SELECT 1 FROM log JOIN session USING (sid) WHERE log.log = ?", (log,)):
        return
    position = 0
    shown = "SELECT start, stop FROM ref WHERE log = ? ORDER BY start"
    stretches = _rows(db, shown, (log,))
    for start, stop in stretches:
        db.execute("DELETE FROM msg WHERE log = ? AND pos >= ? AND pos < ?", (log, position, start))
        position = max(position, stop)
    db.execute("DELETE FROM msg WHERE log = ? AND pos >= ?", (log, position))
    if not stretches:
        db.execute("DELETE FROM log WHERE log = ?", (log,))


def checkpoint(db: apsw.Connection) -> None:
    """Move everything into the database file and empty the write-ahead log, so that erased text is nowhere."""
    busy, _, _ = _row(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    if busy:
        raise StoreError(
            "The session is erased, but another process is reading, so its text may still stand in the -wal file. "
            "It goes with the next checkpoint; call delete on any session, or close the readers, to force one."
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
    row = _row(db, "SELECT version, epoch, claim, expires FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        raise SessionNotFound(session_id)
    found, epoch, held, expires = row
    if held is not None and expires > at:
        _require_gone(session_id, held)
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
    row = _row(
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
    _write_messages(db, log, start, [body for _, body in rows])
    _write_entries(db, "event", sid, evt_end - len(entries), entries, (log, start, start + len(rows)))
    ref = LogRef(origin, log)
    return Appended({key: StoredAt(ref, pos) for pos, (key, _) in enumerate(rows, start)}, evt_end)


def _branch_log(db: apsw.Connection, sid: int, name: str) -> tuple[int, int]:
    db.execute("INSERT OR IGNORE INTO log (sid, name) VALUES (?, ?)", (sid, name))
    (log,) = _row(db, "SELECT log FROM log WHERE sid = ? AND name = ?", (sid, name))
    (start,) = _row(db, "SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE log = ?", (log,))
    return log, start


def _write_entries(
    db: apsw.Connection,
    table: str,
    sid: int,
    after: int,
    entries: Sequence[tuple[Entry, bytes]],
    stretch: tuple[int, int, int] = (0, 0, 0),
) -> None:
    if entries:
        runs = _write_runs(db, sid, after, entries, stretch) if table == "event" else {}
        numbered = [
            (
                sid,
                seq,
                runs.get(entry.run, entry.run),
                entry.kind,
                entry_checksum(sid, seq, entry.run, entry.kind, body),
                body,
            )
            for seq, (entry, body) in enumerate(entries, after + 1)
        ]
        db.executemany(f"INSERT INTO {table} (sid, seq, run, kind, crc, body) VALUES (?, ?, ?, ?, ?, ?)", numbered)


def _write_runs(
    db: apsw.Connection,
    sid: int,
    after: int,
    entries: Sequence[tuple[Entry, bytes]],
    stretch: tuple[int, int, int],
) -> dict[str | None, int]:
    """The numbers of the runs that entries belong to, by their loops' ids; each run notes how far it goes."""
    reach: dict[str, tuple[int, int]] = {}
    for seq, (entry, _) in enumerate(entries, after + 1):
        if entry.run is not None:
            reach[entry.run] = (reach.get(entry.run, (seq, seq))[0], seq)
    upsert = (
        "INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos) VALUES (?, ?, ?, ?, ?, ?, ?)"
        " ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq, end_pos = excluded.end_pos RETURNING run"
    )
    return {loop: _row(db, upsert, (sid, loop, first, last, *stretch))[0] for loop, (first, last) in reach.items()}


def entry_checksum(sid: int, seq: int, run: str | None, kind: str, body: bytes) -> int:
    return checksum(body, sid, seq, checksum(f"{run}/{kind}".encode()))


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
    row = _row(db, "UPDATE session SET inbox_end = inbox_end + 1 WHERE id = ? RETURNING sid, inbox_end", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    sid, seq = row
    _write_entries(db, "inbox", sid, seq - 1, [entry])
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
    row = _row(
        db,
        f"SELECT sid, taken, {'inbox_end' if table == 'inbox' else 'evt_end'},"
        f" (SELECT coalesce(max(seq), 0) FROM {table} WHERE {table}.sid = session.sid),"
        " (SELECT id FROM session AS same WHERE same.sid = session.sid) FROM session WHERE id = ?",
        (session_id,),
    )
    if row is None:
        _require_absent(db, session_id)
        raise SessionNotFound(session_id)
    _require_same(row[4], session_id)
    sid, taken, end, newest, _ = row
    if newest != end:
        raise CorruptRecord(session_id, f"{table} {end}", f"it should be the last one, and {newest} is")
    after = max(after, taken) if table == "inbox" else after
    where, values = f"{table}.sid = ? AND seq > ?", [sid, min(after, LAST)]
    if run is not None:
        found = _row(db, "SELECT run, first_seq, last_seq FROM run WHERE sid = ? AND loop = ?", (sid, run))
        where += f" AND {table}.run = ? AND seq BETWEEN ? AND ?"
        values += found or (0, 0, 0)
    order, most = ("seq DESC", last) if last is not None else ("seq", limit)
    source = "run.loop, kind, crc, body FROM event LEFT JOIN run ON run.run = event.run"
    if table == "inbox":
        source = "run, kind, crc, body FROM inbox"
    rows = _rows(
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
    row = _row(db, "SELECT sid FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    sid = row[0]
    rows = _rows(
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
    row = _row(db, sql, (sid, seq))
    if row is None:
        raise CorruptRecord(session_id, f"event {seq}", "it is missing")
    return _entry_of(session_id, "event", sid, *row)


def log_of(db: apsw.Connection, session_id: str, name: str, origin: str) -> tuple[LogRef, int]:
    sql = (
        "SELECT log.log, (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = log.log)"
        " FROM session LEFT JOIN log ON log.sid = session.sid AND log.name = ? WHERE session.id = ?"
    )
    row = _row(db, sql, (name, session_id))
    if row is None or row[0] is None:
        raise SessionNotFound(session_id if row is None else f"{session_id}/{name}")
    return LogRef(origin, row[0]), row[1]


def lapsed(db: apsw.Connection, at: float) -> list[SessionId]:
    rows = _rows(db, "SELECT id, claim, expires FROM session WHERE claim IS NOT NULL ORDER BY sid", ())
    return [SessionId(key) for key, claim, expires in rows if expires <= at or _holder(key, claim).is_gone]


def find_key(db: apsw.Connection, session_id: str, name: str) -> tuple[Key, int] | None:
    sql = "SELECT digest, key.version FROM key JOIN session USING (sid) WHERE session.id = ? AND name = ?"
    row = _row(db, sql, (session_id, name))
    return None if row is None else (Key(name, row[0]), row[1])


def is_claimed(db: apsw.Connection, session_id: str, at: float) -> bool:
    row = _row(db, "SELECT claim, expires FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    claim, expires = row
    return claim is not None and expires > at and not _holder(session_id, claim).is_gone
