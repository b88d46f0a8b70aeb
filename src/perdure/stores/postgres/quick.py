"""Frequent reads of the record, as one statement each.

A result is returned only if all of it is sound. Anything odd, even a missing session, is left to the job of the same
name, which looks closer and reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from perdure import codec
from perdure.errors import CorruptRecord
from perdure.model.transcript import LogRef
from perdure.protocols import JournalEntry, RunOnRecord, RunProgress
from perdure.stores.format.rows import LAST
from perdure.stores.jobs import heading, previewing, record, sketching, waiting
from perdure.stores.jobs.record import Asked, entries_of, posted_of
from perdure.stores.postgres import headers, previews, sketches
from perdure.stores.postgres import waiting as waits
from perdure.stores.postgres.link import Link
from perdure.stores.postgres.rows import LOG_IS_SOUND, plain, restored

_RECORD = """
    SELECT session.id, session.sid, session.evt_end,
        (SELECT max(newest.last) FROM batch AS newest WHERE newest.sid = session.sid),
        reach.first_seq, reach.last_seq, asked.first, asked.final,
        row.last, row.count, named.loop, row.crc, row.body
    FROM session
    LEFT JOIN run AS reach ON reach.sid = session.sid AND reach.loop = %(run)s::text
    CROSS JOIN LATERAL (
        SELECT
            greatest(least(%(after)s::bigint, session.evt_end) + 1, CASE
                WHEN %(run)s::text IS NOT NULL THEN reach.first_seq
                WHEN %(last)s::bigint IS NOT NULL THEN session.evt_end - %(last)s::bigint + 1
            END) AS first,
            least(session.evt_end, CASE
                WHEN %(run)s::text IS NOT NULL THEN coalesce(reach.last_seq, 0)
                WHEN %(last)s::bigint IS NULL THEN least(%(after)s::bigint, session.evt_end) + %(limit)s::bigint
            END) AS final
    ) AS asked
    LEFT JOIN LATERAL (
        SELECT batch.* FROM batch
        WHERE batch.sid = session.sid AND batch.last >= asked.first AND batch.last <= (
            SELECT min(bound.last) FROM batch AS bound WHERE bound.sid = session.sid AND bound.last >= asked.final
        )
    ) AS row ON asked.first <= asked.final
    LEFT JOIN run AS named ON named.run = row.run
    WHERE session.id = %(id)s
    ORDER BY row.last
"""
_INBOX = """
    SELECT session.id, session.sid, session.inbox_end, session.taken,
        (SELECT max(newest.seq) FROM inbox AS newest WHERE newest.sid = session.sid),
        row.seq, row.run, row.kind, row.crc, row.body
    FROM session
    LEFT JOIN inbox AS row ON row.sid = session.sid AND row.seq > greatest(%(after)s::bigint, session.taken)
    WHERE session.id = %(id)s
    ORDER BY row.seq
"""
_RUNS = """
    SELECT session.id, session.sid, run.loop, run.first_seq, run.last_seq, run.log, run.first_pos, run.end_pos,
        first.last, first.count, first_run.loop, first.crc, first.body,
        last.last, last.count, last_run.loop, last.crc, last.body, own.name
    FROM session
    LEFT JOIN LATERAL (
        SELECT * FROM run
        WHERE run.sid = session.sid AND run.first_seq < %(before)s
        ORDER BY run.first_seq DESC LIMIT %(limit)s
    ) AS run ON true
    LEFT JOIN LATERAL (
        SELECT * FROM batch WHERE batch.sid = session.sid AND batch.last >= run.first_seq ORDER BY batch.last LIMIT 1
    ) AS first ON true
    LEFT JOIN LATERAL (
        SELECT * FROM batch WHERE batch.sid = session.sid AND batch.last >= run.last_seq ORDER BY batch.last LIMIT 1
    ) AS last ON true
    LEFT JOIN run AS first_run ON first_run.run = first.run
    LEFT JOIN run AS last_run ON last_run.run = last.run
    LEFT JOIN log AS own ON own.log = run.log AND own.sid = session.sid
    WHERE session.id = %(id)s
    ORDER BY run.first_seq
"""
_RUN = _RUNS.replace("AND run.first_seq <", "AND run.loop = %(run)s AND run.first_seq <", 1)
_LOG = f"""
    SELECT session.id, log.log, (SELECT coalesce(max(msg.pos) + 1, 0) FROM msg WHERE msg.log = log.log),
        session.msg_end
    FROM session JOIN log ON log.sid = session.sid AND log.name = %s
    WHERE session.id = %s AND {LOG_IS_SOUND}
"""
# By its name and also by its hash, since the name or its index may be damaged.
_NO_KEY = """
    SELECT session.id FROM session
    WHERE session.id = %(id)s
        AND NOT EXISTS (SELECT 1 FROM key WHERE key.sid = session.sid AND key.name = %(name)s)
        AND NOT EXISTS (SELECT 1 FROM key WHERE key.name_hash = hashtextextended(%(name)s, session.sid))
"""


class Odd(Exception):
    """The error for rows that do not fit together."""


def _require(is_so: bool) -> None:
    if not is_so:
        raise Odd


async def _read_record(link: Link, session_id: str, asked: Asked) -> list[JournalEntry]:
    values = {"id": session_id, "after": _bound(asked.after), "last": _bound(asked.last), "limit": _bound(asked.limit)}
    rows = await link.rows(_RECORD, {**values, "run": None if asked.run is None else plain(asked.run)})
    _require(bool(rows))
    found_id, sid, end, newest, run_first, run_last, first, final = rows[0][:8]
    _require(found_id == session_id and end == (newest or 0) and (asked.run is None or run_first is not None))
    if first > final:
        return []
    entries = [entry for row in rows for entry in _entries(session_id, sid, *row[8:])]
    entries = [entry for entry in entries if first <= entry.seq <= final]
    _require([entry.seq for entry in entries] == [*range(first, final + 1)])
    if asked.run is not None:
        ends = [entry for entry in (entries[0], entries[-1]) if entry.seq in (run_first, run_last)]
        _require(all(entry.run == asked.run for entry in ends))
    return asked.cut(entries)


async def _read_inbox(link: Link, session_id: str, asked: Asked) -> list[JournalEntry]:
    rows = await link.rows(_INBOX, {"id": session_id, "after": _bound(asked.after)})
    _require(bool(rows))
    found_id, sid, end, taken, newest = rows[0][:5]
    _require(found_id == session_id and end == (newest or 0))
    posted = [row[5:] for row in rows if row[5] is not None]
    after = min(max(asked.after, taken), end)
    _require([row[0] for row in posted] == [*range(after + 1, end + 1)])
    found = [posted_of(session_id, sid, seq, _text(run), restored(kind), *row) for seq, run, kind, *row in posted]
    _require(not any(codec.hashes_in_post(item.body) for item in found))  # their files have to be read too
    return asked.cut(found)


async def _find_key(link: Link, session_id: str, name: str) -> None:
    """Return None if the session lacks the key, as before most runs. If the key exists, the job finds it."""
    rows = await link.rows(_NO_KEY, {"id": session_id, "name": plain(name)})
    _require(rows == [(session_id,)])


async def _runs(
    link: Link,
    session_id: str,
    origin: str,
    limit: int | None = None,
    before: int | None = None,
    run: str | None = None,
) -> list[RunOnRecord]:
    wanted = {"id": session_id, "limit": limit, "before": LAST if before is None else min(before, LAST)}
    asked = (_RUNS, wanted) if run is None else (_RUN, {**wanted, "run": plain(run)})
    rows = await link.rows(*asked)
    _require(bool(rows) and all(row[0] == session_id for row in rows))
    found = []
    for row in rows:
        sid, stored_loop, first_seq, last_seq, log, start, stop = row[1:8]
        if stored_loop is None:
            continue
        loop = restored(stored_loop)
        first = _entry(_entries(session_id, sid, *row[8:13]), first_seq)
        last = _entry(_entries(session_id, sid, *row[13:18]), last_seq)
        _require(first.run == last.run == loop and row[18] in ("", stored_loop))
        found.append(RunOnRecord(loop, first, last, LogRef(origin, log), start, stop))
    return found


async def _log_of(link: Link, session_id: str, name: str, origin: str) -> tuple[LogRef, int]:
    rows = await link.rows(_LOG, (plain(name), session_id))
    _require(len(rows) == 1 and rows[0][0] == session_id)
    _, log, end, msg_end = rows[0]
    _require(bool(name) or end == msg_end)
    return LogRef(origin, log), end


async def _progress(link: Link, session_id: str, after: int) -> RunProgress:
    found = await sketches.progress(link, session_id, after)
    if found is None:
        raise Odd
    return found


def _entries(
    session_id: str, sid: int, last: int | None, count: int, run: str | None, crc: int, body: bytes
) -> list[JournalEntry]:
    if last is None:
        raise Odd
    return entries_of(session_id, sid, last, count, _text(run), crc, body)


def _entry(entries: Iterable[JournalEntry], seq: int) -> JournalEntry:
    found = next((entry for entry in entries if entry.seq == seq), None)
    if found is None:
        raise Odd
    return found


def _text(stored: str | None) -> str | None:
    return None if stored is None else restored(stored)


def _bound(number: int | None) -> int | None:
    """Return a number that is small enough for the server to add another one."""
    return None if number is None else min(number, LAST // 4)


_WAYS: Mapping[Any, Callable[..., Awaitable[Any]]] = {
    record.read_record: _read_record,
    record.read_whole_inbox: _read_inbox,
    record.find_key: _find_key,
    record.runs: _runs,
    record.log_of: _log_of,
    sketching.progress: _progress,
    previewing.previews: previews.read,
    heading.heads: headers.read,
    waiting.waiting: waits.waiting,
    waiting.in_turn: waits.in_turn,
    waiting.held: waits.held,
}


def reads_no_bodies(job: Callable[[], Any]) -> bool:
    """Tell whether a job has a quick way that reads nothing which may be sealed."""
    return getattr(job, "func", None) in _WITHOUT_BODIES


_WITHOUT_BODIES = (record.log_of, waiting.waiting, waiting.in_turn, waiting.held)


async def answered(link: Link, job: Callable[[], Any]) -> Any:
    """Return the same as a job, if there is a quick way and nothing is odd. Raise Odd otherwise."""
    way = _WAYS.get(getattr(job, "func", None))
    if way is None:
        raise Odd
    try:
        return await way(link, *job.args, **job.keywords)  # type: ignore[attr-defined]  # it is a partial: it has a `func`
    except CorruptRecord:
        raise Odd from None
