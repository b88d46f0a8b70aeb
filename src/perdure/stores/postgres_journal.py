"""The journal's side of the PostgreSQL store that goes out alone: keeping claims, the inbox, reading the record."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from perdure import codec
from perdure.errors import ClaimLost, CorruptRecord, InvalidData, SessionNotFound, StoreError
from perdure.model.ids import SessionId
from perdure.model.transcript import LogRef
from perdure.protocols import Claim, Entry, JournalEntry, Key, RunOnRecord
from perdure.stores.format.packing import unpack_entries
from perdure.stores.format.rows import LAST, Batch, batch_checksum, entry_checksum, operation_id
from perdure.stores.postgres_link import Connection, Link
from perdure.stores.postgres_rows import (
    KEY_IS_SOUND,
    LOG_IS_SOUND,
    given_time,
    holder_of,
    plain,
    require_log,
    restored,
)

_TIME = "coalesce(%(at)s::double precision, extract(epoch FROM clock_timestamp())::double precision)"
_HEARTBEAT = f"""
    UPDATE session SET expires = {_TIME} + %(lease)s
    WHERE id = %(id)s AND epoch = %(epoch)s AND claim IS NOT NULL RETURNING 1
"""
_RELEASE = """
    WITH freed AS (
        UPDATE session SET claim = NULL, expires = NULL WHERE id = %(id)s AND epoch = %(epoch)s RETURNING sid
    )
    DELETE FROM claimed USING freed WHERE claimed.sid = freed.sid RETURNING 1
"""
_LAPSE = """
    UPDATE session SET expires = 0 WHERE id = %(id)s AND epoch = %(epoch)s AND claim IS NOT NULL RETURNING 1
"""
_LAPSE_ALL = """
    UPDATE session SET expires = 0 FROM unnest(%s::text[], %s::bigint[]) AS given (id, epoch)
    WHERE session.id = given.id AND session.epoch = given.epoch AND claim IS NOT NULL RETURNING 1
"""
_LAST_WORD = 5.0
_CLAIM = f"SELECT claim, expires > {_TIME} FROM session WHERE id = %(id)s"
_LAPSED = f"""
    SELECT session.id, session.claim, session.expires <= {_TIME}
    FROM claimed JOIN session ON session.sid = claimed.sid WHERE session.claim IS NOT NULL ORDER BY session.sid
"""
_ENDS = """
    SELECT sid, evt_end, inbox_end, taken,
        coalesce((SELECT max(last) FROM batch WHERE batch.sid = session.sid), 0),
        coalesce((SELECT max(seq) FROM inbox WHERE inbox.sid = session.sid), 0)
    FROM session WHERE id = %s
"""
# The index is on the last number of a batch: the first that ends at or after the one asked for holds it.
_BATCHES = """
    SELECT batch.last, batch.count, run.loop, batch.crc, batch.body
    FROM batch LEFT JOIN run ON run.run = batch.run
    WHERE batch.sid = %(sid)s AND batch.last >= %(first)s AND batch.last <= coalesce(
        (SELECT min(across.last) FROM batch AS across WHERE across.sid = %(sid)s AND across.last >= %(final)s), %(end)s
    )
    ORDER BY batch.last
"""
_INBOX = "SELECT seq, run, kind, crc, body FROM inbox WHERE sid = %s AND seq > %s AND seq <= %s ORDER BY seq"
_RUNS = """
    SELECT loop, first_seq, last_seq, log, first_pos, end_pos FROM run
    WHERE sid = %(sid)s AND first_seq < %(before)s AND (%(loop)s::text IS NULL OR loop = %(loop)s)
    ORDER BY first_seq DESC LIMIT %(limit)s
"""
_LOG = f"""
    SELECT log.log, {LOG_IS_SOUND}, (SELECT coalesce(max(pos) + 1, 0) FROM msg WHERE msg.log = log.log)
    FROM session LEFT JOIN log ON log.sid = session.sid AND log.name = %s WHERE session.id = %s
"""
# By its name, and by the hash of that: the name or its index may be damaged.
_KEY = f"""
    WITH asked AS MATERIALIZED (SELECT sid FROM session WHERE id = %(id)s)
    SELECT name, digest, version, {KEY_IS_SOUND} FROM key WHERE sid = (SELECT sid FROM asked) AND name = %(name)s
    UNION ALL
    SELECT name, digest, version, {KEY_IS_SOUND} FROM key
    WHERE name_hash = hashtextextended(%(name)s, (SELECT sid FROM asked))
"""


async def heartbeat(link: Link, claim: Claim) -> None:
    asked = {"id": str(claim.session_id), "epoch": claim.epoch, "lease": float(claim.lease), "at": given_time()}
    if await link.row(_HEARTBEAT, asked) is None:
        raise ClaimLost(claim.session_id, claim.epoch)


async def release(link: Link, claim: Claim, interrupted: bool) -> None:
    await link.rows(_LAPSE if interrupted else _RELEASE, {"id": str(claim.session_id), "epoch": claim.epoch})


async def lapse(link: Link, claims: Sequence[Claim]) -> None:
    """Have claims lapse, if the server can be reached at once: else they do when their leases have run out."""
    if claims:
        ids, epochs = [str(claim.session_id) for claim in claims], [claim.epoch for claim in claims]
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_LAST_WORD):
                await link.rows(_LAPSE_ALL, (ids, epochs))


async def post(link: Link, session_id: SessionId, entry: Entry, body: bytes) -> int:
    """Put an item into the inbox. Sent again after a lost connection, it is found there under its operation's id."""
    op = operation_id()

    async def write(connection: Connection) -> int:
        async with connection.transaction():
            found = await connection.execute(
                "SELECT sid, inbox_end, (SELECT seq FROM inbox WHERE inbox.sid = session.sid AND op = %s)"
                " FROM session WHERE id = %s FOR UPDATE",
                (op, str(session_id)),
            )
            row: Any = await found.fetchone()
            if row is None:
                raise SessionNotFound(session_id)
            sid, seq, posted = row[0], row[1] + 1, row[2]
            if posted is not None:
                return int(posted)
            crc = entry_checksum(sid, seq, entry.run, entry.kind, body)
            run = None if entry.run is None else plain(entry.run)
            await connection.execute(
                "INSERT INTO inbox (sid, seq, run, kind, crc, op, body) VALUES (%s, %s, %s, %s, %s, %s, %s)",
                (sid, seq, run, plain(entry.kind), crc, op, body),
            )
            await connection.execute("UPDATE session SET inbox_end = %s WHERE sid = %s", (seq, sid))
            return int(seq)

    return await link.read(write)


async def read_inbox(link: Link, session_id: str, after: int, limit: int | None) -> list[JournalEntry]:
    """The items of a session's inbox that nobody has taken yet."""
    sid, _, end, taken, _, newest = await _ends(link, session_id)
    if end != newest:
        raise CorruptRecord(session_id, f"inbox {end}", f"it should be the last one, and {newest} is")
    after = min(max(after, taken), end)
    final = end if limit is None else min(end, after + limit)
    rows = await link.rows(_INBOX, (sid, after, final)) if after < final else []
    for expected, seq in zip_longest(range(after + 1, final + 1), (row[0] for row in rows)):
        if expected != seq:
            raise CorruptRecord(session_id, f"inbox {expected}", "it is missing")
    return [posted_of(session_id, sid, *row) for row in rows]


def posted_of(session_id: str, sid: int, seq: int, run: str | None, kind: str, crc: int, body: bytes) -> JournalEntry:
    run, kind = None if run is None else restored(run), restored(kind)
    if entry_checksum(sid, seq, run, kind, body) != crc:
        raise CorruptRecord(session_id, f"inbox {seq}", "its checksum does not match")
    return JournalEntry(seq, kind, codec.decode_plain(body), run)


async def read_record(
    link: Link, session_id: str, after: int, limit: int | None, last: int | None = None, run: str | None = None
) -> list[JournalEntry]:
    """Entries of a session's record, in order. Batches are read whole, and cut to what was asked for."""
    sid, end, _, _, newest, _ = await _ends(link, session_id)
    if end != newest:
        raise CorruptRecord(session_id, f"event {end}", f"it should be the last one, and {newest} is")
    first, final = min(after, end) + 1, end
    if run is not None:
        asked = "SELECT first_seq, last_seq FROM run WHERE sid = %s AND loop = %s"
        reach = await link.row(asked, (sid, plain(run))) or await _no_such_run(link, session_id, sid, run)
        first, final = max(first, reach[0]), min(final, reach[1])
    elif last is not None:
        first = max(first, end - last + 1)
    elif limit is not None:
        final = min(final, first + limit - 1)
    found = await _read_batches(link, session_id, sid, first, final)
    chosen = found if run is None else [entry for entry in found if entry.run == run]
    return chosen[:limit] if last is None else chosen[max(0, len(chosen) - last) :]


async def _no_such_run(link: Link, session_id: str, sid: int, run: str) -> tuple[int, int]:
    """Return the reach of nothing. Raise CorruptRecord if another index than the one that was asked finds the run."""
    if await link.row("SELECT 1 FROM run WHERE sid = %s AND loop || '' = %s", (sid, plain(run))):
        raise CorruptRecord(session_id, f"run {run}", "an index does not find it")
    return 1, 0


async def _ends(link: Link, session_id: str) -> Any:
    """A session's number, where its record and its inbox end, how far that is taken, and the last rows of both."""
    row = await link.row(_ENDS, (session_id,))
    if row is None:
        raise SessionNotFound(session_id)
    return row


async def _read_batches(link: Link, session_id: str, sid: int, first: int, final: int) -> list[JournalEntry]:
    """The entries from one number to another; CorruptRecord if one of them is missing."""
    if first > final:
        return []
    asked = {"sid": sid, "first": first, "final": final, "end": LAST}
    found: list[JournalEntry] = []
    for row in await link.rows(_BATCHES, asked):
        found += entries_of(session_id, sid, *row)
    wanted = [entry for entry in found if first <= entry.seq <= final]
    for expected, entry in zip_longest(range(first, final + 1), wanted):
        if entry is None or entry.seq != expected:
            raise CorruptRecord(session_id, f"event {expected}", "it is missing")
    return wanted


def entries_of(
    session_id: str, sid: int, last: int, count: int, run: str | None, crc: int, body: bytes
) -> list[JournalEntry]:
    where, run = f"event {last}", None if run is None else restored(run)
    if batch_checksum(sid, last, Batch(count, run, {}, body)) != crc:
        raise CorruptRecord(session_id, where, "its checksum does not match")
    try:
        entries = unpack_entries(run, body)
    except InvalidData as error:
        raise CorruptRecord(session_id, where, str(error)) from None
    if len(entries) != count:
        raise CorruptRecord(session_id, where, f"its batch should hold {count} entries, and holds {len(entries)}")
    return [JournalEntry(seq, each.kind, each.body, each.run) for seq, each in enumerate(entries, last - count + 1)]


async def runs(
    link: Link, session_id: str, origin: str, limit: int | None, before: int | None, run: str | None
) -> list[RunOnRecord]:
    sid = (await _ends(link, session_id))[0]
    asked = {
        "sid": sid,
        "before": LAST if before is None else min(before, LAST),
        "loop": None if run is None else plain(run),
        "limit": limit,
    }
    found = []
    for loop, first_seq, last_seq, log, start, stop in reversed(await link.rows(_RUNS, asked)):
        first, last = [(await _read_batches(link, session_id, sid, seq, seq))[0] for seq in (first_seq, last_seq)]
        found.append(RunOnRecord(restored(loop), first, last, LogRef(origin, log), start, stop))
    return found


async def log_of(link: Link, session_id: str, name: str, origin: str) -> tuple[LogRef, int]:
    row = await link.row(_LOG, (plain(name), session_id))
    if row is None or row[0] is None:
        raise SessionNotFound(session_id if row is None else f"{session_id}/{name}")
    log, is_sound, end = row
    require_log(session_id, log, is_sound)
    return LogRef(origin, log), end


async def lapsed(link: Link) -> Sequence[SessionId]:
    rows = await link.rows(_LAPSED, {"at": given_time()})
    return [SessionId(key) for key, claim, over in rows if over or holder_of(key, claim).is_gone]


async def find_key(link: Link, session_id: str, name: str) -> tuple[Key, int] | None:
    asked = plain(name)
    rows = await link.rows(_KEY, {"id": session_id, "name": asked})
    if not all(row[3] for row in rows):
        raise CorruptRecord(session_id, f"key {name!r}", "its checksum does not match")
    return next(((Key(name, restored(row[1])), row[2]) for row in rows if row[0] == asked), None)


async def is_interrupted(link: Link, session_id: str) -> bool:
    row = await link.row(_CLAIM, {"id": session_id, "at": given_time()})
    claim, stands = row or (None, None)
    return claim is not None and (not stands or holder_of(session_id, claim).is_gone)


async def is_claimed(link: Link, session_id: str) -> bool:
    row = await link.row(_CLAIM, {"id": session_id, "at": given_time()})
    if row is None:
        raise SessionNotFound(session_id)
    claim, stands = row
    return claim is not None and bool(stands) and not holder_of(session_id, claim).is_gone
