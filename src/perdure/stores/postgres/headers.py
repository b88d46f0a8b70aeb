"""Heads of many sessions by one statement, and the values that they name by a second one."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.protocols import SessionHead
from perdure.stores.jobs.heading import Definitions, assembled, newest_of, unpacked, unread_values
from perdure.stores.postgres.link import Link

_HEADS = """
    SELECT session.id, session.sid, session.version, head.version, head.crc, head.body
    FROM session LEFT JOIN head ON head.sid = session.sid AND head.version >= session.version
    WHERE session.id = ANY (%s)
    ORDER BY session.sid, head.version
"""
_VALUES = "SELECT hash, body FROM value WHERE hash = ANY (%s)"


async def read(link: Link, session_ids: Sequence[str], definitions: Definitions) -> dict[str, SessionHead]:
    """Return the same as the job of this name."""
    rows: dict[tuple[str, int, int], list[Sequence[object]]] = {}
    for session_id, sid, version, *head in await link.rows(_HEADS, ([*session_ids],)):
        rows.setdefault((session_id, sid, version), []).append(head)
    found = {place[0]: newest_of(*place, heads) for place, heads in rows.items()}
    found = {session_id: found[session_id] for session_id in session_ids if session_id in found}
    unread = unread_values(found, definitions)
    bodies = dict(await link.rows(_VALUES, ([*unread],))) if unread else {}
    return assembled(found, unpacked(unread, bodies), definitions)
