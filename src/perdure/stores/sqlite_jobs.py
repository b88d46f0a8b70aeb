"""What the SQLite store does inside a transaction: plain functions on a connection, run by a worker's thread."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from itertools import pairwise
from typing import Any

import apsw
import msgspec

from perdure.errors import (
    ClaimLost,
    CorruptRecord,
    InvalidData,
    InvalidSessionId,
    PerdureError,
    RunInterrupted,
    SessionConflict,
    SessionNotFound,
    StoreError,
)
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession, AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.model.transcript import LogRef
from perdure.protocols import Claim, Key, SessionQuery
from perdure.stores.beginnings import Beginning
from perdure.stores.cache import CachedSession
from perdure.stores.format import packing
from perdure.stores.format.heads import StoredHead, decode_info, encode_head, unpacked_head
from perdure.stores.format.placement import Placement, foreign_stretches
from perdure.stores.format.rows import Batch, ListPlace, Stretch, another_session, checksum, hash_of, page_start
from perdure.stores.format.tapes import TapeCache
from perdure.stores.jobs.listing import matches
from perdure.stores.sqlite_tables import (
    first_row,
    meta,
    new_log,
    number,
    read_messages,
    require_absent,
    require_gone,
    require_same,
    rows_of,
    write_batch,
    write_key,
    write_messages,
)


class Write(msgspec.Struct, frozen=True):
    """A save or a create, ready for the writer: everything that could be done before the transaction is."""

    session: AgentSession
    placement: Placement
    at: datetime
    op: str
    origin: str
    live: CachedSession | None = None
    claim: Claim | None = None
    batch: Batch | None = None
    taken: int = 0
    key: Key | None = None


def create(db: apsw.Connection, write: Write) -> CachedSession:
    info = write.session.info
    found = first_row(db, "SELECT version FROM session WHERE id = ?", (info.id,))
    if found is not None:
        raise SessionConflict(info.id, 0, found[0])
    require_absent(db, info.id)
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
    log = new_log(db, sid)
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


_CAS_UNCLAIMED = _CAS.format(claim="claim IS NULL")
_CAS_CLAIMED = _CAS.format(claim="claim IS NOT NULL AND epoch = ?")


def save(db: apsw.Connection, write: Write) -> CachedSession:
    info, claim = write.session.info, write.claim
    row = first_row(
        db,
        _CAS_UNCLAIMED if claim is None else _CAS_CLAIMED,
        (
            info.status.value,
            info.agent_name,
            write.at.timestamp(),
            len(write.placement.new),
            write.batch.count if write.batch else 0,
            write.taken,
            str(info.id),
            info.version,
            info.created_at.timestamp(),
            *(() if claim is None else (claim.epoch,)),
        ),
    )
    if row is None:
        raise _refusal(db, write.session, claim, write.at.timestamp())
    sid, log, msg_end, evt_end, erasures = row
    live = write.live if write.live is not None and write.live.erasures == erasures else None
    if live is None or live.session.info.tags != info.tags:
        db.execute("DELETE FROM tag WHERE sid = ?", (sid,))
        _write_tags(db, sid, info.tags)
    stretch = (log, msg_end - len(write.placement.new), msg_end)
    write_batch(db, sid, evt_end, write.batch, stretch)
    if write.key is not None:
        write_key(db, sid, write.key.name, write.key.digest, info.version + 1)
    return _write_version(db, write, sid, log, msg_end - len(write.placement.new), live, erasures)


def _refusal(db: apsw.Connection, session: AgentSession, claim: Claim | None, at: float) -> PerdureError:
    """Why a session was not saved."""
    session_id, version = session.id, session.version
    row = first_row(db, "SELECT version, epoch, claim, expires FROM session WHERE id = ?", (str(session_id),))
    if row is None:
        return SessionNotFound(session_id)
    found, epoch, holder, expires = row
    if claim is not None and (holder is None or epoch != claim.epoch):
        return ClaimLost(session_id, claim.epoch)
    if claim is None and holder is not None:
        if expires > at:
            require_gone(session_id, holder)
        return RunInterrupted(session_id)
    if found != version:
        return SessionConflict(session_id, version, found)
    return another_session(session)


def _write_tags(db: apsw.Connection, sid: int, tags: Iterable[str]) -> None:
    if tags:
        db.executemany("INSERT INTO tag (tag, sid) VALUES (?, ?)", [(tag, sid) for tag in tags])


def _write_version(
    db: apsw.Connection, write: Write, sid: int, log: int, start: int, live: CachedSession | None, erasures: int
) -> CachedSession:
    own = LogRef(write.origin, log)
    settled = write.placement.settle(own, start)
    version = write.session.version + 1
    kept = AgentSession.reconstitute(settled, version=version, updated_at=write.at)
    write_messages(db, log, start, write.placement.new)
    body, values = encode_head(kept, write.op)
    if kept.state.execution is not None:
        body = packing.pack(body)  # what has run has a record, whose disk counts more than the time to pack
    db.execute(
        "INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)",
        (sid, version, checksum(body, sid, version), body),
    )
    known = live.hashes if live else frozenset()
    for key in values.keys() - known:
        db.execute("INSERT OR IGNORE INTO value (hash, body) VALUES (?, ?)", (key, packing.pack(values[key])))
        db.execute("INSERT OR IGNORE INTO uses (hash, sid) VALUES (?, ?)", (key, sid))
    refs = live.refs if live else frozenset()
    named = foreign_stretches(kept, own)
    for stretch in named - refs:
        _write_ref(db, kept.info, sid, stretch)
    return CachedSession(kept, erasures, frozenset(values), frozenset(named))


def _write_ref(db: apsw.Connection, info: AgentSessionInfo, sid: int, stretch: Stretch) -> None:
    """Note that a session shows part of another's log, unless it is noted; SessionNotFound if that is erased."""
    log, start, stop = stretch
    noted = "SELECT 1 FROM ref WHERE child = ? AND log = ? AND start <= ? AND stop >= ?"
    if first_row(db, noted, (sid, log, start, stop)):
        return
    owner = first_row(db, "SELECT session.sid FROM log JOIN session USING (sid) WHERE log.log = ?", (log,))
    if owner == (sid,):
        return
    if owner is None:
        count = "SELECT count(*) FROM msg WHERE log = ? AND pos >= ? AND pos < ?"
        if first_row(db, count, (log, start, stop)) != (stop - start,):
            raise SessionNotFound(info.parent_id or f"log {log}")
    db.execute("INSERT INTO ref (log, child, start, stop) VALUES (?, ?, ?, ?)", (log, sid, start, stop))


def _erasures(db: apsw.Connection) -> int:
    return number(meta(db, "erasures"), None, "meta erasures")


_PEEK = "SELECT version, (SELECT value FROM meta WHERE key = 'erasures') FROM session WHERE id = ?"


def peek(db: apsw.Connection, session_id: str) -> tuple[int, int] | None:
    """A session's version, and how much has been erased so far."""
    found: tuple[int, int] | None = first_row(db, _PEEK, (str(session_id),))
    if found is None:
        require_absent(db, session_id)
    return found


class Loaded(msgspec.Struct, frozen=True):
    """What a load has read, to be put together in the caller's thread, where the tapes are."""

    head: StoredHead
    values: dict[str, bytes]
    fetched: list[tuple[int, int, list[Message]]]
    erasures: int


def load(
    db: apsw.Connection, session_id: str, version: int | None, shelf: TapeCache, cached: dict[str, bytes]
) -> Loaded | None:
    row = first_row(
        db,
        "SELECT session.sid, session.version, (SELECT max(version) FROM head WHERE head.sid = session.sid),"
        " head.version, head.crc, head.body, (SELECT id FROM session AS same WHERE same.sid = session.sid)"
        " FROM session LEFT JOIN head"
        " ON head.sid = session.sid AND head.version = coalesce(?, session.version) WHERE session.id = ?",
        (version, session_id),
    )
    if row is None:
        require_absent(db, session_id)
        return None
    require_same(row[6], session_id)
    sid, newest, last, found, crc, body, _ = row
    if version is None and not newest == last == found:
        raise CorruptRecord(session_id, f"head {newest}", f"it should be the last one, and head {last} is")
    if found is None:
        known = [number(each, session_id, "version") for each in (newest, last) if each is not None]
        if version is not None and version > max(known, default=0):
            return None
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    if version is not None and found != version:
        raise CorruptRecord(session_id, f"head {version}", f"the index finds head {found} in its place")
    head = StoredHead(unpacked_head(body, crc, session_id, sid, found), session_id, found)
    values = head.gathered(lambda key: cached.get(key) or read_value(db, session_id, key))
    missing = shelf.missing(head.wanted(values))
    fetched = [(int(log), start, read_messages(db, session_id, int(log), start, stop)) for log, start, stop in missing]
    return Loaded(head, values, fetched, _erasures(db))


def read_value(db: apsw.Connection, session_id: str, key: str) -> bytes:
    where, row = f"value {key}", first_row(db, "SELECT body FROM value WHERE hash = ?", (key,))
    if row is None:
        raise CorruptRecord(session_id, where, "it is missing")
    try:
        value = packing.unpack(row[0]) if type(row[0]) is bytes else b""
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None
    if hash_of(value) != key:
        raise CorruptRecord(session_id, where, "its hash does not match")
    return value


def read_log(db: apsw.Connection, log: int, start: int, stop: int) -> list[Message]:
    """Messages of a log, whoever shows them; SessionNotFound if it does not reach there, or does no longer."""
    count, end, owned = first_row(
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
    rows = rows_of(
        db,
        "SELECT session.created, session.sid, CAST(session.id AS BLOB), session.version,"
        " CAST(session.status AS BLOB), head.crc, head.body FROM session"
        " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
        f" WHERE {' AND '.join(where)} ORDER BY session.created DESC, session.sid DESC LIMIT ?",
        (*values, query.limit + 1),
    )
    if any(newer[:2] <= older[:2] for newer, older in pairwise(rows)):
        raise CorruptRecord(None, "of the session table", "its rows are out of order")
    infos: list[AgentSessionInfo] = []
    damaged: list[CorruptRecord] = []
    for row in rows[: query.limit]:
        try:
            infos.append(_info_of(query, *row))
        except CorruptRecord as error:
            damaged.append(error)
    more = ListPlace(*rows[query.limit - 1][:2]).next if len(rows) > query.limit else None
    return SessionInfoList(infos, next=more, damaged=damaged)


def ids_with_prefix(db: apsw.Connection, sought: Beginning) -> list[SessionId]:
    rows = rows_of(
        db,
        "SELECT CAST(id AS BLOB) FROM session WHERE id >= ?1 AND id < ?2 AND (status = 'deleted') = ?3"
        " AND (?4 IS NULL OR owner = ?4) ORDER BY id LIMIT ?5",
        (*sought.bounds, sought.deleted, sought.owner, sought.limit),
    )
    try:
        return [SessionId(found.decode(errors="replace")) for (found,) in rows]
    except InvalidSessionId as error:
        raise CorruptRecord(None, "of the session table", str(error)) from None


def _info_of(
    query: SessionQuery,
    created: float,
    sid: int,
    raw_id: bytes,
    version: int,
    status: bytes,
    crc: int | None,
    body: bytes | None,
) -> AgentSessionInfo:
    session_id = raw_id.decode(errors="replace")
    if crc is None or body is None:
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    info = decode_info(unpacked_head(body, crc, session_id, sid, version), session_id, version)
    # The time may be an index's, which can lead to another row than the one that it was noted for.
    said = (info.created_at.timestamp(), info.id, info.version, info.status.value.encode())
    if said != (created, session_id, version, status) or not matches(info, query):
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
    ]
    asked = [(sql, value) for sql, value in given if value is not None]
    where = [sql for sql, _ in asked]
    values = [value.timestamp() if isinstance(value, datetime) else value for _, value in asked]
    if (start := page_start(query.after)) is not None:
        where.append("(session.created, session.sid) < (?, ?)")
        values += start
    if query.status not in (None, SessionStatus.ACTIVE):
        where.append("session.status <> 'active'")  # what the index on the others says of itself
    if not query.shows_deleted:
        where.append(f"session.status <> '{SessionStatus.DELETED.value}'")
    return where or ["1"], values


def delete(db: apsw.Connection, session_id: str, at: float) -> None:
    """Erase a session, but for those of its messages that another session's versions show."""
    row = first_row(db, "SELECT sid, claim, expires FROM session WHERE id = ?", (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    sid, claim, expires = row
    if claim is not None and expires > at:
        require_gone(session_id, claim)
    shown = [log for (log,) in db.execute("SELECT DISTINCT log FROM ref WHERE child = ?", (sid,))]
    own = [log for (log,) in db.execute("SELECT log FROM log WHERE sid = ?", (sid,))]
    hashes = [key for (key,) in db.execute("SELECT hash FROM uses WHERE sid = ?", (sid,))]
    db.execute("DELETE FROM ref WHERE child = ?", (sid,))
    for table in ("head", "batch", "run", "inbox", "key", "tag", "uses", "session"):
        db.execute(f"DELETE FROM {table} WHERE sid = ?", (sid,))
    for log in {*own, *shown}:
        erase_unshown(db, log)
    for key in hashes:
        db.execute("DELETE FROM value WHERE hash = ?1 AND NOT EXISTS (SELECT 1 FROM uses WHERE hash = ?1)", (key,))
    count_erasure(db)


def count_erasure(db: apsw.Connection, by: int = 1) -> None:
    """Let everybody know that what they have at hand may have been erased. By 0, only their pages are read again."""
    db.execute("UPDATE meta SET value = value + ? WHERE key = 'erasures'", (by,))


def erase_unshown(db: apsw.Connection, log: int) -> None:
    """Erase what nobody shows of a log whose session is gone."""
    if first_row(db, "SELECT 1 FROM log JOIN session USING (sid) WHERE log.log = ?", (log,)):
        return
    position = 0
    shown = "SELECT start, stop FROM ref WHERE log = ? ORDER BY start"
    stretches = rows_of(db, shown, (log,))
    for start, stop in stretches:
        db.execute("DELETE FROM msg WHERE log = ? AND pos >= ? AND pos < ?", (log, position, start))
        position = max(position, stop)
    db.execute("DELETE FROM msg WHERE log = ? AND pos >= ?", (log, position))
    if not stretches:
        db.execute("DELETE FROM log WHERE log = ?", (log,))


def checkpoint(db: apsw.Connection) -> None:
    """Move everything into the database file and empty the write-ahead log, so that erased text is nowhere."""
    busy, _, _ = first_row(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    if busy:
        raise StoreError(
            "The session is erased, but another process is reading, so its text may still stand in the -wal file. "
            "It goes with the next checkpoint; call gc() when the others have read, or close them, to force one."
        )
