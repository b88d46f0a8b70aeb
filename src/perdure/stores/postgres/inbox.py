"""Posting to a session's inbox: one statement, once it is known where the inbox ends.

An item carries an operation's id. If the answer was lost, the id tells whether the item is there. If an owner's items
are counted over all sessions, an item is posted in a transaction.
"""

from __future__ import annotations

from typing import Any

from perdure.errors import QueueFull, SessionNotFound, StoreError
from perdure.stores.cache import LRU
from perdure.stores.format.rows import entry_checksum, operation_id
from perdure.stores.jobs.record import Post
from perdure.stores.postgres.link import Connection, Link, Queries, ask, fetched
from perdure.stores.postgres.rows import NOW, OWNER_LOCK, OWNERS, given_time, plain, restored

_MOST_TRIES = 40
# An item's checksum covers its place. If the inbox ends elsewhere, nothing is written, and the answer is its end.
_POST = f"""
    WITH at AS MATERIALIZED (
        SELECT sid, inbox_end, inbox_end - taken AS waits FROM session WHERE id = %(id)s FOR UPDATE
    ),
    ready AS MATERIALIZED (
        SELECT sid, waits FROM at WHERE sid = %(sid)s::bigint AND inbox_end = %(seq)s::bigint - 1
            AND (%(most)s::bigint IS NULL OR waits < %(most)s::bigint)
    ),
    posted AS (
        INSERT INTO inbox (sid, seq, run, kind, crc, op, body)
        SELECT sid, %(seq)s::bigint, %(run)s::text, %(kind)s::text, %(crc)s::bigint, %(op)s::text, %(body)s::bytea
        FROM ready
    ),
    moved AS (
        UPDATE session SET inbox_end = %(seq)s::bigint,
            priority = CASE ready.waits WHEN 0 THEN %(priority)s::bigint
                ELSE greatest(session.priority, %(priority)s::bigint) END,
            since = CASE ready.waits WHEN 0 THEN coalesce(%(at)s::float8, {NOW}) ELSE session.since END
        FROM ready WHERE session.sid = ready.sid
    )
    SELECT sid, inbox_end, waits, sid = ANY (ARRAY(SELECT sid FROM ready)) FROM at
"""
_POSTED = """
    SELECT inbox.seq FROM session JOIN inbox ON inbox.sid = session.sid WHERE session.id = %s AND inbox.op = %s
"""
# A statement of its own takes the lock. The next one, which counts, then sees what others have committed by that time.
_LOCK_OWNER = f"""
    WITH at AS MATERIALIZED (SELECT owner FROM session WHERE id = %s FOR UPDATE)
    SELECT owner, {OWNER_LOCK.replace("%s::text", "owner")} FROM at
"""
_OF_OWNER = """
    SELECT coalesce(sum(waits), 0)::bigint FROM (
        SELECT session.inbox_end - session.taken AS waits FROM waiting JOIN session ON session.sid = waiting.sid
        WHERE waiting.owner = %s LIMIT %s
    ) AS few
"""
_NOWHERE = (0, 0)


class Inbox:
    """A poster of items, which remembers where inboxes end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ends: LRU[str, tuple[int, int]] = LRU(1024)

    def note(self, session_id: str, sid: int, end: int) -> None:
        """Note where an inbox was seen to end. It may have grown since: the next post finds that out."""
        self._ends.keep(session_id, (sid, end))

    async def post(self, session_id: str, item: Post) -> int:
        """Put an item into a session's inbox, and return its number."""
        op = operation_id()
        if item.most_of_owner is not None:
            return await self._link.transact(lambda: self._post_counted(session_id, item, op))
        attempts = 0

        async def work(connection: Connection) -> int:
            nonlocal attempts
            attempts += 1
            # The answer to the first attempt may have been lost after it was committed.
            if attempts > 1 and (there := await fetched(connection, _POSTED, (session_id, op))):
                return int(there[0][0])
            return await ask(connection, self._post(session_id, item, op))

        return await self._link.read(work)

    def _post_counted(self, session_id: str, item: Post, op: str) -> Queries[int]:
        """Post an item, or raise QueueFull if its owner has too many."""
        most = item.most_of_owner
        assert most is not None
        # First the session, then its owner: claims lock in the same order, so that no two wait for each other.
        rows = yield _LOCK_OWNER, (session_id, OWNERS)
        owner = rows[0][0] if rows else None
        if owner is not None:
            ((waits,),) = yield _OF_OWNER, (owner, most)
            if waits >= most:
                raise QueueFull(session_id, most, restored(owner))
        return (yield from self._post(session_id, item, op))

    def _post(self, session_id: str, item: Post, op: str) -> Queries[int]:
        entry, body = item.entry, item.body
        given: dict[str, Any] = {
            "id": session_id,
            "op": op,
            "run": None if entry.run is None else plain(entry.run),
            "kind": plain(entry.kind),
            "body": body,
            "priority": item.priority,
            "most": item.most,
            "at": given_time(),
        }
        sid, end = self._ends.recall(session_id) or _NOWHERE
        for _ in range(_MOST_TRIES):
            crc = entry_checksum(sid, end + 1, entry.run, entry.kind, body)
            rows = yield _POST, {**given, "sid": sid, "seq": end + 1, "crc": crc}
            if not rows:
                raise SessionNotFound(session_id)
            sid, found_end, waits, is_done = rows[0]
            end = end + 1 if is_done else found_end
            self.note(session_id, sid, end)
            if is_done:
                return end
            if item.most is not None and waits >= item.most:
                raise QueueFull(session_id, item.most)
        raise StoreError(f"The inbox of session {session_id!r} fills faster than it can be posted to. Try again.")
