"""Searching messages in PostgreSQL: an index of their words finds them, and Python looks at what was found.

What is written is only noted as not indexed yet; whoever searches brings the index up to date before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg

from perdure import codec
from perdure.errors import InvalidData
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.protocols import SearchHit
from perdure.stores.postgres_archive import Db, first_row, rows_of, write_many
from perdure.stores.postgres_link import Link
from perdure.stores.postgres_rows import plain, restored
from perdure.stores.rows import checksum
from perdure.stores.search import MOST_RANKED, Lent, Place, Query, Term, attributed, rank, text_of, words_of

_LOCK = 0x70657266
_STRETCHES_AT_ONCE = 500
# PostgreSQL's own bounds are 2 KB for a word and 1 MB for all of a message.
_LONGEST_WORD = 200
_MOST_BYTES = 500_000

_UNINDEXED = f"""
    DELETE FROM unindexed WHERE ctid = ANY (ARRAY(SELECT ctid FROM unindexed LIMIT {_STRETCHES_AT_ONCE}))
    RETURNING log, start, stop
"""
_FOUND = f"""
    SELECT word.log, word.pos, msg.crc, msg.body, session.id, session.agent, session.status, session.owner
    FROM word JOIN msg ON msg.log = word.log AND msg.pos = word.pos
    LEFT JOIN log ON log.log = word.log LEFT JOIN session ON session.sid = log.sid
    WHERE word.words @@ %s::tsquery
        AND (%s::text IS NULL OR session.owner = %s OR session.sid IS NULL OR session.status = 'deleted')
        AND (%s::bigint[] IS NULL OR word.log = ANY (%s::bigint[]))
    ORDER BY word.number DESC LIMIT {MOST_RANKED}
"""
_LOGS = """
    SELECT log.log FROM log JOIN session ON session.sid = log.sid WHERE session.id = %s
    UNION SELECT ref.log FROM ref JOIN session ON session.sid = ref.child WHERE session.id = %s
"""
_LENT = """
    SELECT ref.log, ref.start, ref.stop, session.id, session.agent, session.status, session.owner
    FROM ref JOIN session ON session.sid = ref.child WHERE ref.log = ANY (%s) ORDER BY session.sid
"""


async def search(link: Link, query: Query) -> list[SearchHit]:
    if not query.terms:
        return []
    while await link.whole(_index):
        pass
    places = await link.whole(lambda db: list(_found(db, query)), snapshot=True)
    return rank(places, query)


def _index(db: Db) -> bool:
    """Index some of what is not indexed yet; whether there was any. One at a time: who waits finds it done."""
    db.execute("SELECT pg_advisory_xact_lock(%s, hashtext(current_schema()))", (_LOCK,))
    stretches = rows_of(db, _UNINDEXED)
    # A message that is erased meanwhile waits until the index of it is there, to go with it.
    sql = "SELECT pos, crc, body FROM msg WHERE log = %s AND pos >= %s AND pos < %s FOR KEY SHARE"
    for log, start, stop in stretches:
        indexed = []
        for pos, crc, body in rows_of(db, sql, log, start, stop):
            message = _message(log, pos, crc, body)
            if message is not None:
                indexed.append((log, pos, _words(message)))
        write_many(
            db,
            "INSERT INTO word (log, pos, words) VALUES (%s, %s, array_to_tsvector(%s::text[]))"
            " ON CONFLICT (log, pos) DO UPDATE SET words = excluded.words",
            indexed,
        )
    return bool(stretches)


def _message(log: int, pos: int, crc: int, body: bytes) -> Message | None:
    """A message, or None if it is damaged: then others are found all the same."""
    try:
        return codec.decode_message(body) if checksum(body, log, pos) == crc else None
    except InvalidData:
        return None


def _words(message: Message) -> list[str]:
    found: list[str] = []
    size = 0
    for word in dict.fromkeys(each[:_LONGEST_WORD] for each in words_of(text_of(message))):
        size += len(word.encode())
        if size > _MOST_BYTES:
            break
        found.append(word)
    return found


def _tsquery(terms: tuple[Term, ...]) -> str:
    """All words of all terms. Whether those of a phrase stand together is seen when it is looked at."""
    wanted: dict[str, None] = {}
    for term in terms:
        for place, word in enumerate(term.words):
            is_stem = (term.prefix and place == len(term.words) - 1) or len(word) > _LONGEST_WORD
            quoted = word[:_LONGEST_WORD].replace("\\", "\\\\").replace("'", "''")
            wanted[f"'{quoted}'{':*' if is_stem else ''}"] = None
    return " & ".join(wanted)


def _found(db: psycopg.Connection[Any], query: Query) -> Iterator[Place]:
    db.execute("SET LOCAL enable_bitmapscan = on")  # the only way in which an index of words is read
    owner = None if query.owner is None else plain(query.owner)
    logs = None
    if query.session_id is not None:
        logs = [log for (log,) in rows_of(db, _LOGS, query.session_id, query.session_id)]
    rows = rows_of(db, _FOUND, _tsquery(query.terms), owner, owner, logs, logs)
    shown: dict[int, list[Lent]] = {}
    for log, start, stop, *info in rows_of(db, _LENT, sorted({row[0] for row in rows})) if rows else ():
        shown.setdefault(log, []).append(Lent(start, stop, _info(*info)))
    for log, pos, crc, body, *info in rows:
        message = _message(log, pos, crc, body)
        if message is not None:
            whose = _info(*info) if info[0] is not None else None
            yield from attributed(whose, [(pos, message)], shown.get(log, ()), query)


def _info(session_id: str, agent: str, status: str, owner: str | None) -> AgentSessionInfo:
    """As much of a header as a search asks about."""
    whose = None if owner is None else restored(owner)
    return AgentSessionInfo(SessionId(session_id), restored(agent), status=SessionStatus(status), owner=whose)


def forget(db: Db, log: int, pos: int) -> None:
    """Have a message that was replaced indexed anew."""
    if first_row(db, "DELETE FROM word WHERE log = %s AND pos = %s RETURNING 1", log, pos) is not None:
        db.execute("INSERT INTO unindexed (log, start, stop) VALUES (%s, %s, %s)", (log, pos, pos + 1))
