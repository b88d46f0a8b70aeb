"""The text of an answer that is being written. Keeping a piece and reading a run's progress are one statement each.

The session's row is locked while a piece is written, so that no piece is kept of an answer that is complete by then.
Listeners are notified.
"""

from __future__ import annotations

from perdure.errors import ClaimLost
from perdure.protocols import Claim, RunProgress, Sketch
from perdure.stores.jobs.claiming import holder_of
from perdure.stores.jobs.sketching import sealed, sound_pieces
from perdure.stores.postgres.link import Link
from perdure.stores.postgres.rows import NOW, given_time, plain

# A new first piece replaces the old one, and only later ones are deleted: one statement cannot delete and add a row.
_KEEP = f"""
    WITH held AS MATERIALIZED (
        SELECT sid, evt_end FROM session WHERE id = %(id)s AND epoch = %(epoch)s AND claim IS NOT NULL FOR UPDATE
    ),
    ready AS MATERIALIZED (
        SELECT sid FROM held WHERE evt_end = %(seq)s::bigint OR evt_end > %(seq)s::bigint AND NOT EXISTS (
            SELECT 1 FROM run WHERE run.sid = held.sid AND run.loop = %(run)s::text AND run.last_seq > %(seq)s::bigint
        )
    ),
    void AS (
        DELETE FROM sketch USING ready WHERE sketch.sid = ready.sid AND sketch.start > 0 AND %(start)s::bigint = 0
    ),
    kept AS (
        INSERT INTO sketch (sid, start, crc, body)
        SELECT sid, %(start)s::bigint, %(crc)s::bigint, %(body)s::bytea FROM ready
        ON CONFLICT (sid, start) DO UPDATE SET crc = excluded.crc, body = excluded.body
    )
    SELECT held.sid = ANY (ARRAY(SELECT sid FROM ready)), CASE WHEN meta.followed > {NOW}
        THEN pg_notify(%(channel)s::text, %(id)s::text) END
    FROM held CROSS JOIN meta
"""
_PROGRESS = f"""
    SELECT session.evt_end, convert_to(session.claim, 'UTF8'), session.expires > coalesce(%(at)s::float8, {NOW}),
        sketch.start, sketch.crc, sketch.body
    FROM session
    LEFT JOIN sketch ON sketch.sid = session.sid AND session.claim IS NOT NULL
        AND (sketch.start >= %(after)s::bigint OR sketch.start = 0)
    WHERE session.id = %(id)s
    ORDER BY sketch.start
"""


async def keep(link: Link, claim: Claim, piece: Sketch) -> bool:
    """Do what the job of this name does."""
    crc, body = sealed(claim.session_id, piece)
    place = {"id": str(claim.session_id), "epoch": claim.epoch, "seq": piece.seq, "start": piece.start}
    said = {"run": plain(piece.run), "crc": crc, "body": body}
    rows = await link.rows(_KEEP, {**place, **said, "channel": link.channel})
    if not rows:
        raise ClaimLost(claim.session_id, claim.epoch)
    return bool(rows[0][0])


async def progress(link: Link, session_id: str, after: int) -> RunProgress | None:
    """Do what the job of this name does. Return None if the job has to look closer.

    That is so for a missing session, and if something was recorded after the pieces.
    """
    rows = await link.rows(_PROGRESS, {"id": str(session_id), "at": given_time(), "after": after})
    if not rows:
        return None
    end, claim, stands = rows[0][:3]
    if claim is None:
        return RunProgress(end, False, False)
    is_held = bool(stands) and not holder_of(session_id, claim).is_gone
    pieces = sound_pieces(session_id, (row[3:] for row in rows if row[3] is not None))
    if pieces and pieces[0].seq != end:
        return None
    return RunProgress(end, is_held, not is_held, pieces)
