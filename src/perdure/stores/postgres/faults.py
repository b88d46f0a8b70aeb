"""Checks of a PostgreSQL schema below its rows: columns and tables that follow from others, and the search index."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from perdure.errors import CorruptRecord, KeyUnavailable
from perdure.protocols import Problem
from perdure.stores.engine import Job
from perdure.stores.format.heads import StoredHead, unpacked_head
from perdure.stores.format.rows import Values
from perdure.stores.jobs.values import read_value
from perdure.stores.postgres.link import Queries
from perdure.stores.postgres.rows import KEY_IS_SOUND, LOG_IS_SOUND, queries_of, restored
from perdure.stores.sealing import Sealing
from perdure.stores.tapes import TapeCache

_COPY = "No message is affected. Copying the store into a new schema rebuilds it."
_BACKUP = "It has changed since it was written. Restore the database, or the session, from a backup."
_CLAIMS = "A killed run of it would not be found by `recover`. Run `recover` on the session by its id."
_LEFT_OVER = "SELECT sid FROM claimed WHERE NOT EXISTS (SELECT 1 FROM session WHERE session.sid = claimed.sid) LIMIT 20"
_UNNOTED = (
    "SELECT id FROM session WHERE claim IS NOT NULL"
    " AND NOT EXISTS (SELECT 1 FROM claimed WHERE claimed.sid = session.sid)"
)
_UNCLAIMED = "SELECT id FROM session JOIN claimed ON claimed.sid = session.sid WHERE claim IS NULL"
# What is not indexed yet is gathered first. One look at it for each message would take forever in a store without
# searches, where all messages are still to be indexed.
_NEVER_FOUND = """
    WITH waiting AS MATERIALIZED (
        SELECT log, range_agg(int8range(start, stop)) AS stretches FROM unindexed WHERE start < stop GROUP BY log
    )
    SELECT msg.log, min(msg.pos) FROM msg LEFT JOIN waiting ON waiting.log = msg.log
    WHERE NOT coalesce(waiting.stretches @> msg.pos, false)
        AND NOT EXISTS (SELECT 1 FROM word WHERE word.log = msg.log AND word.pos = msg.pos)
    GROUP BY msg.log LIMIT 20
"""
_TAGS = (
    "SELECT id FROM tag JOIN session USING (sid)"
    " WHERE (tag.owner, tag.agent, tag.status, tag.spawned, tag.created, tag.recent) IS DISTINCT FROM"
    " (session.owner, session.agent, session.status, session.spawned, session.created, session.recent) LIMIT 20"
)
_BACKDATED = (
    "SELECT id FROM session WHERE updated < created"
    " AND NOT EXISTS (SELECT 1 FROM backdated WHERE backdated.sid = session.sid) LIMIT 20"
)
_WAITING = """
    SELECT coalesce(session.id, waiting.sid::text) FROM waiting
    FULL JOIN (SELECT * FROM session WHERE inbox_end > taken) AS session ON session.sid = waiting.sid
    WHERE session.sid IS NULL OR (waiting.owner, waiting.status, waiting.priority, waiting.since)
        IS DISTINCT FROM (session.owner, session.status, session.priority, session.since) LIMIT 20
"""
_HEADS = "SELECT version, crc, body, hashes, wanted FROM head WHERE sid = %s ORDER BY version"


def faults(sealing: Sealing) -> Queries[list[Problem]]:
    found: list[Problem] = []
    for look in (_sequences, _seals, _claims, _waiting, _tags, _backdated, _words, partial(_fetched_along, sealing)):
        found += yield from look()
    return found


def _sequences() -> Queries[list[Problem]]:
    found = []
    if len((yield "SELECT erasures FROM meta", ())) > 1:
        found.append(Problem(None, "meta erasures", "it is not the number of erasures so far", _COPY))
    for table in ("session", "log", "run", "timer"):
        number = "sid" if table == "session" else table
        ((last, highest),) = yield (
            f"SELECT pg_sequence_last_value(pg_get_serial_sequence('{table}', '{number}')::regclass),"
            f" (SELECT max({number}) FROM {table})",
            (),
        )
        if highest is not None and (last is None or last < highest):
            what = "it is behind the highest number in use, so that a number might be given out twice"
            found.append(Problem(None, f"the sequence of {table}", what, _COPY))
    return found


def _seals() -> Queries[list[Problem]]:
    found = []
    for table, number, is_sound in (("key", "sid", KEY_IS_SOUND), ("log", "log", LOG_IS_SOUND)):
        for place, name in (yield f"SELECT {number}, name FROM {table} WHERE NOT ({is_sound}) LIMIT 20", ()):
            found.append(Problem(None, f"{table} {place}/{restored(name)}", "its checksum does not match", _BACKUP))
    return found


def _waiting() -> Queries[list[Problem]]:
    what = "it is not noted as its row says, so that workers may not find it, or look in vain"
    return [Problem(id, "what waits in its inbox", what, _COPY) for (id,) in (yield _WAITING, ())]


def _claims() -> Queries[list[Problem]]:
    left_over = "It takes up some space. `perdure gc`, or copying the store, leaves it behind."
    found = [
        Problem(None, f"claimed {sid}", "it belongs to no session", left_over) for (sid,) in (yield _LEFT_OVER, ())
    ]
    what = "it is not noted where recovery looks"
    found += [Problem(session_id, "its claim", what, _CLAIMS) for (session_id,) in (yield _UNNOTED, ())]
    what = "it is noted where recovery looks, and the session has none"
    return found + [Problem(session_id, "its claim", what, _COPY) for (session_id,) in (yield _UNCLAIMED, ())]


def _tags() -> Queries[list[Problem]]:
    """Compare tags with their sessions' rows, whose columns they repeat."""
    what = "they do not say what its row says, so that lists by tag may not show it"
    return [Problem(session_id, "its tags in lists", what, _COPY) for (session_id,) in (yield _TAGS, ())]


def _backdated() -> Queries[list[Problem]]:
    what = "it was updated before it was created, and is not noted where lists look for such"
    return [Problem(session_id, "its place in lists", what, _COPY) for (session_id,) in (yield _BACKDATED, ())]


def _words() -> Queries[list[Problem]]:
    found = []
    for log, first in (yield _NEVER_FOUND, ()):
        what = f"message {first} of log {log} is not in it, and nobody is going to put it there"
        found.append(Problem(None, f"the search index of log {log}", what, _COPY))
    return found


def _fetched_along(sealing: Sealing) -> Queries[list[Problem]]:
    """Compare a head's columns with its body. By these columns one statement fetches the values and messages too."""
    what = "it does not name the values and the messages that the version is made of"
    ids = dict((yield "SELECT sid, id FROM session", ()))
    wrong = yield from wrongly_fetched_along(sealing)
    return [
        Problem(ids[sid], f"what is fetched along with version {version}", what, _COPY) for sid, version, _ in wrong
    ]


def wrongly_fetched_along(sealing: Sealing) -> Queries[list[tuple[int, int, list[str]]]]:
    """Return the versions whose columns differ from their bodies, each with the values that it names."""
    found = []
    for sid, session_id in (yield "SELECT sid, id FROM session ORDER BY sid", ()):
        values: Values = {}
        for version, crc, body, hashes, wanted in (yield _HEADS, (sid,)):
            try:
                body, crc = sealing.opened("head", body, crc)
                head = StoredHead(unpacked_head(body, crc, session_id, sid, version), session_id, version)
                named = yield from queries_of(_gathered(session_id, head, values), None, sealing)
                is_right = {*hashes} == named.keys() and (wanted is None or _is_wanted(head, named, wanted))
            except (CorruptRecord, KeyUnavailable):
                continue  # reading the session reports a damaged head
            if not is_right:
                found.append((sid, version, [*named]))
    return found


def _gathered(session_id: str, head: StoredHead, known: Values) -> Job[Values]:
    """Return all values that are needed to rebuild a version. Those that are read are added to `known`."""
    while missing := [key for key in head.hashes(known) if key not in known]:
        for key in missing:
            known[key] = yield from read_value(session_id, key)
    return {key: known[key] for key in head.hashes(known)}


def _is_wanted(head: StoredHead, values: Values, wanted: Sequence[int]) -> bool:
    threes = list(zip(*(iter(wanted),) * 3, strict=False))
    tapes = TapeCache("")  # which merges stretches that touch
    return 3 * len(threes) == len(wanted) and tapes.missing(threes) == tapes.missing(head.wanted(values))
