"""Erasing a session from PostgreSQL, but for those of its messages that another session's versions show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from perdure.errors import SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.stores.postgres_link import GATE, Connection, Link
from perdure.stores.postgres_rows import given_time, require_gone

# In the order in which a batch of changes locks them too, so that no two wait for each other.
_FOUND = """
    SELECT id, sid, claim,
        expires > coalesce(%s::double precision, extract(epoch FROM clock_timestamp())::double precision)
    FROM session WHERE id = ANY (%s) ORDER BY sid FOR UPDATE
"""
_AT_ONCE = 500
# Those who are about to use a value or a log hold the lock together; see write.sql. Every statement after this one
# sees what they have written.
_ALONE = "SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))"
_TABLES = ("head", "batch", "run", "inbox", "key", "tag", "claimed", "session")
_UNUSED = """
    DELETE FROM value WHERE hash = ANY (%s) AND NOT EXISTS (SELECT 1 FROM uses WHERE uses.hash = value.hash)
"""


async def delete(link: Link, session_id: SessionId) -> None:
    was_there = False

    async def erase(connection: Connection) -> None:
        nonlocal was_there
        async with connection.transaction():
            sid = await _find(connection, session_id)
            if sid is None and not was_there:
                raise SessionNotFound(session_id)
            was_there = True
            if sid is not None:  # else it went when this was tried before, and the connection broke
                await _erase(connection, sid)

    await link.read(erase)


async def delete_many(link: Link, session_ids: Sequence[SessionId]) -> list[SessionId]:
    """Erase sessions, but for those that are being run or gone already; which they were."""
    erased: list[SessionId] = []
    for start in range(0, len(session_ids), _AT_ONCE):
        erased += await _delete_some(link, session_ids[start : start + _AT_ONCE])
    return erased


async def _delete_some(link: Link, session_ids: Sequence[SessionId]) -> list[SessionId]:
    were_there: set[SessionId] = set()

    async def erase(connection: Connection) -> list[SessionId]:
        async with connection.transaction():
            found: dict[SessionId, int] = {}
            left: set[SessionId] = set()
            for session_id, sid, claim, stands in await _locked(connection, session_ids):
                try:
                    _require_free(session_id, claim, stands)
                    found[session_id] = sid
                except SessionBusy:
                    left.add(session_id)
            were_there.update(found)
            if found:
                await _erase(connection, *found.values())
        # What is not found any more went when this was tried before, and the connection broke.
        return [each for each in session_ids if each in were_there - left]

    return await link.read(erase)


async def _find(connection: Connection, session_id: SessionId) -> int | None:
    """The number of a session that nobody runs, locked; SessionBusy if somebody does."""
    for _, sid, claim, stands in await _locked(connection, [session_id]):
        _require_free(session_id, claim, stands)
        return sid
    return None


async def _locked(
    connection: Connection, session_ids: Sequence[SessionId]
) -> list[tuple[SessionId, int, str | None, bool | None]]:
    rows = await _fetch(connection, _FOUND, (given_time(), list(map(str, session_ids))))
    return [(SessionId(session_id), sid, claim, stands) for session_id, sid, claim, stands in rows]


def _require_free(session_id: SessionId, claim: str | None, stands: bool | None) -> None:
    if claim is not None and stands:
        require_gone(session_id, claim)


async def _erase(connection: Connection, *sids: int) -> None:
    await connection.execute(_ALONE, (GATE,))
    await connection.execute("UPDATE meta SET erasures = erasures + 1")
    for sid in sids:
        await _erase_one(connection, sid)


async def _erase_one(connection: Connection, sid: int) -> None:
    shown = await _fetch(connection, "DELETE FROM ref WHERE child = %s RETURNING log", (sid,))
    own = await _fetch(connection, "SELECT log FROM log WHERE sid = %s", (sid,))
    hashes = await _fetch(connection, "DELETE FROM uses WHERE sid = %s RETURNING hash", (sid,))
    for table in _TABLES:
        await connection.execute(f"DELETE FROM {table} WHERE sid = %s".encode(), (sid,))
    for (log,) in sorted({*own, *shown}):
        await _erase_unshown(connection, log)
    await connection.execute(_UNUSED, ([key for (key,) in hashes],))


async def _erase_unshown(connection: Connection, log: int) -> None:
    """Erase what nobody shows of a log whose session is gone."""
    if await _fetch(connection, "SELECT 1 FROM log JOIN session ON session.sid = log.sid WHERE log.log = %s", (log,)):
        return
    position = 0
    stretches = await _fetch(connection, "SELECT start, stop FROM ref WHERE log = %s ORDER BY start", (log,))
    for start, stop in stretches:
        gap = (log, position, start)
        await connection.execute("DELETE FROM msg WHERE log = %s AND pos >= %s AND pos < %s", gap)
        position = max(position, stop)
    await connection.execute("DELETE FROM msg WHERE log = %s AND pos >= %s", (log, position))
    if not stretches:
        await connection.execute("DELETE FROM log WHERE log = %s", (log,))


async def _fetch(connection: Connection, query: str, parameters: tuple[Any, ...]) -> list[Any]:
    return await (await connection.execute(query, parameters)).fetchall()
