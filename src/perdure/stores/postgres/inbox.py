"""Posting to a session's inbox: one statement, once it is known where the inbox ends.

An item carries an operation's id. If the answer was lost, the id tells whether the item is there.
"""

from __future__ import annotations

from typing import Any

from perdure.errors import SessionNotFound, StoreError
from perdure.protocols import Entry
from perdure.stores.cache import LRU
from perdure.stores.format.rows import entry_checksum, operation_id
from perdure.stores.postgres.link import Connection, Link, fetched
from perdure.stores.postgres.rows import plain

_MOST_TRIES = 40
# The item's checksum is made for its place: if the inbox ends elsewhere, nothing is written, and the end is told.
_POST = """
    WITH at AS MATERIALIZED (SELECT sid, inbox_end FROM session WHERE id = %(id)s FOR UPDATE),
    ready AS MATERIALIZED (SELECT sid FROM at WHERE sid = %(sid)s::bigint AND inbox_end = %(seq)s::bigint - 1),
    posted AS (
        INSERT INTO inbox (sid, seq, run, kind, crc, op, body)
        SELECT sid, %(seq)s::bigint, %(run)s::text, %(kind)s::text, %(crc)s::bigint, %(op)s::text, %(body)s::bytea
        FROM ready
    ),
    moved AS (UPDATE session SET inbox_end = %(seq)s::bigint FROM ready WHERE session.sid = ready.sid)
    SELECT sid, inbox_end, sid = ANY (ARRAY(SELECT sid FROM ready)) FROM at
"""
_POSTED = """
    SELECT inbox.seq FROM session JOIN inbox ON inbox.sid = session.sid WHERE session.id = %s AND inbox.op = %s
"""
_NOWHERE = (0, 0)


class Inbox:
    """Posts items, and remembers where inboxes end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ends: LRU[str, tuple[int, int]] = LRU(1024)

    def note(self, session_id: str, sid: int, end: int) -> None:
        """Note where an inbox was seen to end. If it has moved on since, that is found out."""
        self._ends.keep(session_id, (sid, end))

    async def post(self, session_id: str, entry: Entry, body: bytes) -> int:
        """Put an item into a session's inbox, and return its number."""
        run = None if entry.run is None else plain(entry.run)
        values = {"id": session_id, "op": operation_id(), "run": run, "kind": plain(entry.kind), "body": body}
        attempts = 0

        async def work(connection: Connection) -> int:
            nonlocal attempts
            attempts += 1
            if attempts > 1 and (there := await fetched(connection, _POSTED, (session_id, values["op"]))):
                return int(there[0][0])
            return await self._post(connection, session_id, entry, body, values)

        return await self._link.read(work)

    async def _post(
        self, connection: Connection, session_id: str, entry: Entry, body: bytes, values: dict[str, Any]
    ) -> int:
        sid, end = self._ends.recall(session_id) or _NOWHERE
        for _ in range(_MOST_TRIES):
            crc = entry_checksum(sid, end + 1, entry.run, entry.kind, body)
            rows = await fetched(connection, _POST, {**values, "sid": sid, "seq": end + 1, "crc": crc})
            if not rows:
                raise SessionNotFound(session_id)
            sid, found_end, is_done = rows[0]
            end = end + 1 if is_done else found_end
            self.note(session_id, sid, end)
            if is_done:
                return end
        raise StoreError(f"The inbox of session {session_id!r} fills faster than it can be posted to. Try again.")
