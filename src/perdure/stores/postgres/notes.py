"""Entries that are recorded without a claim: the session's row is locked, and all is written by one statement.

Listeners are notified. The operation's id in the session's row stays as it is. If the connection of a run breaks, that
id tells the run whether its own last write was made.
"""

from __future__ import annotations

from typing import Any

from perdure.errors import SessionNotFound
from perdure.stores.format.rows import Batch
from perdure.stores.jobs.saving import Place, row_of_batch, rows_of_runs
from perdure.stores.postgres.link import Link, Queries
from perdure.stores.postgres.rows import NOW, plain

_PLACE = "SELECT sid, log, msg_end, evt_end FROM session WHERE id = %s FOR UPDATE"
# A run keeps its log. That may be the log of a branch, whose end is not that of the session's log.
_NOTE = f"""
    WITH runs AS (
        INSERT INTO run (sid, loop, first_seq, last_seq, log, first_pos, end_pos)
        SELECT %(sid)s, new.loop, new.first_seq, new.last_seq, %(log)s, %(msg_end)s, %(msg_end)s
        FROM unnest(%(loops)s::text[], %(firsts)s::bigint[], %(lasts)s::bigint[]) AS new (loop, first_seq, last_seq)
        ON CONFLICT (sid, loop) DO UPDATE SET last_seq = excluded.last_seq,
            end_pos = CASE run.log WHEN excluded.log THEN excluded.end_pos ELSE run.end_pos END
        RETURNING run, loop
    ),
    noted AS (
        INSERT INTO batch (sid, last, count, run, crc, body)
        SELECT %(sid)s, %(last)s, %(count)s, (SELECT run FROM runs WHERE loop = %(run)s::text), %(crc)s, %(body)s::bytea
    ),
    moved AS (UPDATE session SET evt_end = %(last)s WHERE sid = %(sid)s)
    SELECT pg_notify(%(channel)s::text, %(id)s::text) FROM meta WHERE followed > {NOW}
"""


async def note(link: Link, session_id: str, batch: Batch | None) -> Place:
    """Do what the job of this name does. Return where the session's log and record end afterwards."""
    return await link.transact(lambda: _queries(link.channel, session_id, batch))


def _queries(channel: str, session_id: str, batch: Batch | None) -> Queries[Place]:
    rows = yield _PLACE, (session_id,)
    if not rows:
        raise SessionNotFound(session_id)
    place = Place(*rows[0])
    if batch is not None:
        yield _NOTE, {"channel": channel, "id": session_id, **_columns(place, batch)}
        place = place.moved(0, batch.count)
    return place


def _columns(place: Place, batch: Batch) -> dict[str, Any]:
    last = place.evt_end + batch.count
    runs = rows_of_runs(place.sid, last, batch, (place.log, place.msg_end, place.msg_end))
    return {
        "sid": place.sid,
        "log": place.log,
        "msg_end": place.msg_end,
        "loops": [plain(row[1]) for row in runs],
        "firsts": [row[2] for row in runs],
        "lasts": [row[3] for row in runs],
        "last": last,
        "count": batch.count,
        "run": None if batch.run is None else plain(batch.run),
        "crc": row_of_batch(place.sid, last, batch, None)[4],
        "body": batch.body,
    }
