"""Loading and listing: what the PostgreSQL store reads of sessions and their logs."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from perdure.errors import CorruptRecord, InvalidData, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSessionInfo, SessionInfoList, SessionStatus
from perdure.protocols import SessionQuery
from perdure.stores.beginnings import Beginning
from perdure.stores.format import packing
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head
from perdure.stores.format.rows import ListPlace, hash_of, page_start
from perdure.stores.format.tapes import TapeCache
from perdure.stores.jobs.listing import matches
from perdure.stores.postgres_link import Link
from perdure.stores.postgres_rows import Place, decode_rows, plain

_PEEK = """
    SELECT session.sid, session.log, session.msg_end, session.evt_end, session.version, meta.erasures
    FROM session CROSS JOIN meta WHERE session.id = %s
"""
# With its messages, if nothing is known of it and they are few.
_LOAD = """
    SELECT session.sid, session.log, session.msg_end, session.evt_end, session.version, meta.erasures,
        head.version, head.crc, head.body, value.hashes, value.bodies,
        msg.logs, msg.places, msg.sums, msg.bodies,
        (SELECT max(newest.version) FROM head AS newest WHERE newest.sid = session.sid)
    FROM session CROSS JOIN meta
    LEFT JOIN head ON head.sid = session.sid AND head.version = coalesce(%(version)s, session.version)
    LEFT JOIN LATERAL (
        SELECT array_agg(hash) AS hashes, array_agg(body) AS bodies
        FROM value WHERE hash = ANY (head.hashes)
    ) AS value ON true
    LEFT JOIN LATERAL (
        SELECT array_agg(row.log) AS logs, array_agg(row.pos) AS places, array_agg(row.crc) AS sums,
            array_agg(row.body) AS bodies
        FROM generate_series(1, cardinality(head.wanted), 3) AS each
        JOIN msg AS row ON row.log = head.wanted[each]
            AND row.pos >= head.wanted[each + 1] AND row.pos < head.wanted[each + 2]
        WHERE %(cold)s
    ) AS msg ON true
    WHERE session.id = %(id)s
"""
_VALUES = "SELECT hash, body FROM value WHERE hash = ANY (%s)"
_MESSAGES = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s ORDER BY pos"


Known = tuple[int, int]
"""The version of a session that is at hand, and the count of erasures then."""


class Loaded(msgspec.Struct, frozen=True):
    """What a load has read. `head` is None if the session is as it was known."""

    place: Place
    erasures: int
    head: StoredHead | None = None
    values: dict[str, bytes] = {}


async def load(
    link: Link, session_id: str, version: int | None, known: Known | None, shelf: TapeCache, *, cold: bool
) -> Loaded | None:
    """Read a session, and put its messages onto the shelf; None if there is no such version."""
    if known is not None:
        seen = await link.row(_PEEK, (session_id,))
        if seen is None or seen[4:] == known:
            return None if seen is None else Loaded(Place(*seen[:4]), seen[5])
    asked = {
        "id": session_id,
        "version": version,
        "cold": cold,
    }
    row = await link.row(_LOAD, asked)
    if row is None:
        return None
    place, (newest, erasures, found, crc, body) = Place(*row[:4]), row[4:9]
    last = row[15]
    if version is None and not newest == last == found:
        raise CorruptRecord(session_id, f"head {newest}", f"it should be the last one, and head {last} is")
    if found is None:
        if version is not None and version > max(newest, last or 0):
            return None
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    head = StoredHead(unpacked_head(body, crc, session_id, place.sid, found), session_id, found)
    values = await _values(link, session_id, head, dict(zip(row[9] or (), row[10] or (), strict=True)))
    _put_on_shelf(session_id, shelf, row[11:15])
    for log, start, stop in shelf.missing(head.wanted(values)):
        messages = await read_messages(link, session_id, int(log), start, stop)
        shelf.put(int(log), start, messages)
    return Loaded(place, erasures, head, values)


async def _values(link: Link, session_id: str, head: StoredHead, known: dict[str, bytes]) -> dict[str, bytes]:
    """The values that a head names: what was fetched along with it, and if that is not all, the rest."""
    values: dict[str, bytes] = {}
    while wanted := [key for key in head.hashes(values) if key not in values]:
        missing = [key for key in wanted if key not in known]
        if missing:
            known |= dict(await link.rows(_VALUES, (missing,)))
        values |= {key: unpacked_value(session_id, key, known.get(key)) for key in wanted}
    return values


def unpacked_value(session_id: str, key: str, stored: bytes | None) -> bytes:
    """A value as it was before it was packed; CorruptRecord if it is missing, or another."""
    try:
        value = None if stored is None else packing.unpack(stored)
    except InvalidData as error:
        raise CorruptRecord(session_id, f"value {key}", str(error)) from None
    if value is None or hash_of(value) != key:
        problem = "it is missing" if value is None else "its hash does not match"
        raise CorruptRecord(session_id, f"value {key}", problem)
    return value


def _put_on_shelf(session_id: str, shelf: TapeCache, columns: Any) -> None:
    """Messages that came along with the head, stretch by stretch."""
    if columns[0] is None:
        return
    stretches: list[tuple[int, int, list[tuple[int, int, bytes]]]] = []
    for log, pos, crc, body in sorted(zip(*columns, strict=True)):
        if stretches and stretches[-1][0] == log and stretches[-1][1] + len(stretches[-1][2]) == pos:
            stretches[-1][2].append((pos, crc, body))
        else:
            stretches.append((log, pos, [(pos, crc, body)]))
    for log, start, rows in stretches:
        shelf.put(log, start, decode_rows(session_id, log, start, start + len(rows), rows))


async def read_messages(link: Link, session_id: str | None, log: int, start: int, stop: int) -> list[Message]:
    return decode_rows(session_id, log, start, stop, await link.rows(_MESSAGES, (log, start, stop)))


async def read_log(link: Link, log: int, start: int, stop: int) -> list[Message]:
    """Messages of a log, whoever shows them; SessionNotFound if it does not reach there, or does no longer."""
    count, end, owned = await link.row(
        "SELECT (SELECT count(*) FROM msg WHERE log = %(log)s AND pos >= %(start)s AND pos < %(stop)s),"
        " (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE log = %(log)s),"
        " EXISTS (SELECT 1 FROM log JOIN session ON session.sid = log.sid WHERE log.log = %(log)s)",
        {"log": log, "start": start, "stop": stop},
    )
    if count < stop - start and (not owned or end < stop):
        raise SessionNotFound(f"log {log}")
    return await read_messages(link, None, log, start, stop)


def list_query(query: SessionQuery) -> tuple[str, list[Any]]:
    """The statement of a page, and its values. The limit is not one of them: a plan depends on it."""
    where, values = _conditions(query)
    statement = (
        "SELECT session.created, session.sid, session.id, session.version, session.status, head.crc, head.body"
        " FROM session"
        " LEFT JOIN head ON head.sid = session.sid AND head.version = session.version"
        f" WHERE {' AND '.join(where)} ORDER BY session.created DESC, session.sid DESC LIMIT {query.limit + 1:d}"
    )
    return statement, values


async def list_sessions(link: Link, query: SessionQuery) -> SessionInfoList:
    statement, values = list_query(query)
    rows = await link.rows(statement, tuple(values))
    infos: list[AgentSessionInfo] = []
    damaged: list[CorruptRecord] = []
    for row in rows[: query.limit]:
        try:
            infos.append(_info_of(query, *row))
        except CorruptRecord as error:
            damaged.append(error)
    more = ListPlace(*rows[query.limit - 1][:2]).next if len(rows) > query.limit else None
    return SessionInfoList(infos, next=more, damaged=damaged)


async def ids_with_prefix(link: Link, sought: Beginning) -> list[SessionId]:
    owner = None if sought.owner is None else plain(sought.owner)
    rows = await link.rows(
        "SELECT id FROM session WHERE id >= %s AND id < %s AND (status = 'deleted') = %s"
        f"{'' if owner is None else ' AND owner = %s'} ORDER BY id LIMIT {sought.limit:d}",
        (*sought.bounds, sought.deleted, *(() if owner is None else (owner,))),
    )
    return [SessionId(found) for (found,) in rows]


def _info_of(
    query: SessionQuery,
    created: float,
    sid: int,
    session_id: str,
    version: int,
    status: str,
    crc: int | None,
    body: bytes | None,
) -> AgentSessionInfo:
    if crc is None or body is None:
        raise CorruptRecord(session_id, f"head {version}", "it is missing")
    info = decode_info(unpacked_head(body, crc, session_id, sid, version), session_id, version)
    said = (info.created_at.timestamp(), info.id, info.version, info.status.value)
    if said != (created, session_id, version, status) or not matches(info, query):
        raise CorruptRecord(session_id, "header", "it does not agree with its head")
    return info


def _conditions(query: SessionQuery) -> tuple[list[str], list[Any]]:
    """SQL conditions and their values; every value is bound."""
    tagged = "EXISTS (SELECT 1 FROM tag WHERE tag.tag = %s AND tag.sid = session.sid)"
    given: list[tuple[str, Any]] = [
        ("session.id = %s", query.id),
        ("session.agent = %s", query.agent),
        ("session.status = %s", query.status.value if query.status else None),
        ("session.owner = %s", query.owner),
        ("session.parent = %s", query.parent),
        (tagged, query.tag),
        ("session.created > %s", query.created_after),
        ("session.created < %s", query.created_before),
        ("session.updated > %s", query.updated_after),
        ("session.updated < %s", query.updated_before),
    ]
    asked = [(condition, value) for condition, value in given if value is not None]
    where, values = [condition for condition, _ in asked], [_bound(value) for _, value in asked]
    if (start := page_start(query.after)) is not None:
        where.append("(session.created, session.sid) < (%s, %s)")
        values += start
    if query.status not in (None, SessionStatus.ACTIVE):
        where.append("session.status <> 'active'")  # what the indexes on the others say of themselves
    if not query.shows_deleted:
        where.append(f"session.status <> '{SessionStatus.DELETED.value}'")
    return where or ["true"], values


def _bound(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.timestamp()
    return plain(value) if isinstance(value, str) else value
