"""Timers: items that go into a session's inbox at a given time, once or repeatedly."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import msgspec
from msgspec.structs import replace

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, KeyForgotten
from perdure.model.ids import SessionId
from perdure.protocols import Entry, Timer
from perdure.stores.engine import Delete, Insert, Job, Lock, Row, Select, Update
from perdure.stores.format.rows import checksum
from perdure.stores.jobs import attachments, record
from perdure.stores.jobs.claiming import sid_of, stored_id
from perdure.stores.jobs.lines import noted

COLUMNS = ("timer", "sid", "name", "due", "crc", "body")


class Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of a timer's row: everything except its name and its time."""

    kind: str | None = None
    """None if it puts nothing into the inbox."""
    body: msgspec.Raw = msgspec.Raw(b"null")
    run: str | None = None
    priority: int = 0
    cron: str | None = None
    timezone: str | None = None


def set_timer(timer: Timer, is_replaced: bool) -> Job[Timer]:
    """Keep a timer, unless the same one is there already."""
    yield Lock((timer.session_id,))
    sid = yield from sid_of(timer.session_id)
    if timer.entry is not None:
        timer = replace(timer, entry=(yield from _with_files(timer.session_id, sid, timer.entry)))
    timer = replace(timer, due=float(timer.due))
    there = yield Select("timer", COLUMNS, {"sid": sid, "name": timer.name})
    if there:
        found = sound_timer(timer.session_id, there[0]) if is_replaced else timer_of(timer.session_id, there[0])
        if found is not None and _ask_the_same(found, timer) and (found.due == timer.due or not is_replaced):
            return found
        if not is_replaced:
            problem = f"session {timer.session_id!r} has another timer {timer.name!r}; replace it, or use another name"
            raise InvalidData("$.name", problem)
        yield Delete("timer", {"sid": sid, "name": timer.name})
    crc, body = sealed(sid, timer)
    ((number,),) = yield Insert("timer", COLUMNS[1:], [(sid, timer.name, timer.due, crc, body)])
    return replace(timer, id=number)


def _ask_the_same(one: Timer, other: Timer) -> bool:
    """Tell whether two timers are the same except for their times."""
    return bool(codec.decode_plain(encoded(one)) == codec.decode_plain(encoded(other)))


def _with_files(session_id: str, sid: int, entry: Entry) -> Job[Entry]:
    """Return an item with the bytes of all images and files that it names, since they may be gone when it is due."""
    _, files = codec.detached_post(entry.body)
    borrowed = sorted({each.hash for each in files if each.body is None})
    if not borrowed:
        return entry
    yield from attachments.require_reachable(session_id, sid, borrowed, (yield from noted(session_id, sid)))
    bodies = yield from attachments.read_bodies(session_id, dict.fromkeys(borrowed, "of a timer"))
    return Entry(entry.kind, codec.attached_post(entry.body, bodies), entry.run)


def timers(session_id: SessionId | None, limit: int, after: int) -> Job[list[Timer]]:
    """Return timers in the order of their numbers."""
    if session_id is not None:
        where = {"timer >": after, "sid": (yield from sid_of(session_id))}
        rows = yield Select("timer", COLUMNS, where, order="timer", limit=limit)
        return [timer_of(session_id, row) for row in rows]
    try:
        rows = yield Select("timer", COLUMNS, {"timer >": after}, order="timer", limit=limit)
    except KeyForgotten:
        rows = yield from _not_forgotten(after, limit)
    ids = yield from _ids_of(rows)
    return [timer_of(ids[row[1]], row) for row in rows if row[1] in ids]


def _not_forgotten(after: int, limit: int) -> Job[list[Row]]:
    """Return the rows of timers without those whose key was forgotten: what these say is erased."""
    found: list[Row] = []
    # A page is filled, since an empty one would be the last.
    while len(found) < limit and (
        page := (yield Select("timer", ("timer",), {"timer >": after}, order="timer", limit=limit))
    ):
        for (number,) in page:
            with suppress(KeyForgotten):
                found += yield Select("timer", COLUMNS, {"timer": number})
        after = page[-1][0]
    return found[:limit]


def due(at: float, limit: int) -> Job[list[Timer]]:
    """Return the timers that are due at a time, earliest first. A damaged one is left out, so that others can ring."""
    rows = yield Select("timer", COLUMNS, {"due <=": at}, order="due timer", limit=limit, lenient=True)
    ids = yield from _ids_of(rows)
    return [timer for row in rows if row[1] in ids and (timer := sound_timer(ids[row[1]], row)) is not None]


def sound_timer(session_id: str, row: Row) -> Timer | None:
    """Return the timer in a row; None if the row is not what was written."""
    try:
        return timer_of(session_id, row)
    except CorruptRecord:
        return None


def _ids_of(rows: Iterable[Row]) -> Job[dict[int, str]]:
    sids = sorted({row[1] for row in rows})
    return dict((yield Select("session", ("sid", "id"), {"sid in": sids}))) if sids else {}


def ring(
    timer: Timer, again: float | None, entry: Entry | None, most: int | None, later: float | None
) -> Job[bool | None]:
    """Put a timer's item into the inbox, and return True. Return False if the timer was rung or changed already.

    If `most` items wait already, it is put off instead, and None is returned.
    """
    yield Lock((timer.session_id,))
    place = yield from record.place_in_inbox(timer.session_id)
    if place is None:
        return False
    # By number and time: a timer that was rung is gone, or has another time. So a late or doubled call does nothing.
    where = {"timer": timer.id, "sid": place.sid, "due": timer.due}
    rows = yield Select("timer", COLUMNS, where)
    if not rows:
        return False
    stored = timer_of(timer.session_id, rows[0])
    item = stored.entry if entry is None else entry
    is_full = item is not None and most is not None and place.end - place.taken >= most
    if is_full:
        again = later if again is None else again
    elif item is not None:
        yield from record.put_into_inbox(timer.session_id, place, record.Post.of(item, stored.priority))
    if again is None:
        yield Delete("timer", {"timer": timer.id, "sid": place.sid})
    else:
        crc, body = sealed(place.sid, replace(stored, due=again))
        values = {"due": again, "crc": crc, "body": body}
        yield Update("timer", values, {"timer": timer.id, "sid": place.sid})
    return None if is_full else True


def drop_timer(session_id: SessionId, name: str) -> Job[bool]:
    yield Lock((session_id,))
    for (sid,) in (yield Select("session", ("sid",), {"id": str(session_id)})):
        where = {"sid": sid, "name": name}
        if (yield Select("timer", ("timer",), where)):
            yield Delete("timer", where)
            return True
    return False


def sealed(sid: int, timer: Timer) -> tuple[int, bytes]:
    """Return the checksum and the body of a timer's row."""
    body = encoded(timer)
    return _checksum(sid, timer.name, timer.due, body), body


def encoded(timer: Timer) -> bytes:
    told = {"priority": timer.priority, "cron": timer.cron, "timezone": timer.timezone}
    if timer.entry is None:
        return msgspec.json.encode(Body(**told))  # type: ignore[arg-type]  # of the types that a timer has checked
    entry = timer.entry
    raw = msgspec.Raw(codec.encode_json(entry.body, f"$.{entry.kind}"))
    return msgspec.json.encode(Body(entry.kind, raw, entry.run, **told))  # type: ignore[arg-type]  # as above


def timer_of(session_id: str, row: Row) -> Timer:
    """Return the timer in a row. Raise CorruptRecord unless the row is what was written."""
    number, sid, name, due, crc, body = row
    where = f"timer {name!r}"
    types = (type(number), type(name), type(due), type(body))
    if types != (int, str, float, bytes) or (crc is not None and crc != _checksum(sid, name, due, body)):
        raise CorruptRecord(session_id, where, "its checksum does not match")
    try:
        told = msgspec.json.decode(body, type=Body)
        entry = None if told.kind is None else Entry(told.kind, codec.decode_plain(bytes(told.body)), told.run)
        return Timer(stored_id(session_id), name, due, entry, told.priority, told.cron, told.timezone, number)
    except (msgspec.MsgspecError, InvalidData) as error:
        raise CorruptRecord(session_id, where, str(error)) from None


def _checksum(sid: int, name: str, due: float, body: bytes) -> int:
    return checksum(b"%b/%b/%b" % (name.encode(), repr(due).encode(), body), sid)
