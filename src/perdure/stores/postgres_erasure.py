"""Erasing a session from PostgreSQL, but for those of its messages that another session's versions show."""

from __future__ import annotations

from typing import Any

from perdure.errors import SessionNotFound
from perdure.model.ids import SessionId
from perdure.stores.postgres_link import GATE, Connection, Link
from perdure.stores.postgres_rows import given_time, require_gone

_FOUND = """
    SELECT sid, claim,
        expires > coalesce(%s::double precision, extract(epoch FROM clock_timestamp())::double precision)
    FROM session WHERE id = %s FOR UPDATE
"""
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


async def _find(connection: Connection, session_id: SessionId) -> int | None:
    """The number of a session that nobody runs, locked; SessionBusy if somebody does."""
    rows = await _fetch(connection, _FOUND, (given_time(), str(session_id)))
    if not rows:
        return None
    ((sid, claim, stands),) = rows
    if claim is not None and stands:
        require_gone(session_id, claim)
    return int(sid)


async def _erase(connection: Connection, sid: int) -> None:
    await connection.execute(_ALONE, (GATE,))
    await connection.execute("UPDATE meta SET erasures = erasures + 1")
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
