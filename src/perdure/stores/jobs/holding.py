"""Legal holds: the check whether a session may be erased, inside the transaction that would erase it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perdure.errors import InvalidData, KeyForgotten, SessionHeld, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.retention import HOLD, is_hold, no_hold
from perdure.stores.engine import Delete, Job, Lock, Select, Where
from perdure.stores.jobs.claiming import stored_id
from perdure.stores.jobs.lines import noted


def callers_of(session_ids: Collection[str]) -> Job[list[SessionId]]:
    """Return the sessions whose sub-agents these are, and their callers. An erasure locks them as well.

    Otherwise a hold could be put on one of them, and be acknowledged, before the erasure is committed.
    """
    found: dict[str, None] = {}
    todo = [*session_ids]
    while todo:
        rows = yield Select("session", ("parent",), {"id": str(todo.pop()), "spawned": 1})
        todo += [parent for (parent,) in rows if parent is not None and parent not in found]
        found |= dict.fromkeys(parent for (parent,) in rows if parent is not None)
    return [stored_id(each) for each in found]


def require_unheld(session_ids: Sequence[str]) -> Job[None]:
    """Raise SessionHeld if one of these sessions, or a caller of it, is under hold."""
    for session_id in session_ids:
        found = yield from hold_on(session_id)
        if found is not None:
            raise SessionHeld(session_id, *found)


def hold_on(session_id: str) -> Job[tuple[str, str] | None]:
    """Return the tag of the hold on a session, and the session that has the tag; None if it is not under hold."""
    holder: str | None = session_id
    seen: set[str] = set()  # callers that were erased and created again could form a circle
    while holder is not None and holder not in seen:
        seen.add(holder)
        rows = yield Select("session", ("sid", "parent", "spawned"), {"id": str(holder)})
        for sid, _, _ in rows:
            tags = sorted(tag for (tag,) in (yield Select("tag", ("tag",), {"sid": sid})) if is_hold(tag))
            if tags:
                return tags[0], holder
        holder = rows[0][1] if rows and rows[0][2] else None
    return None


def holds(session_ids: Sequence[SessionId]) -> Job[dict[SessionId, str]]:
    """Return the sessions among these that are under hold, each with the tag."""
    found: dict[SessionId, str] = {}
    for session_id in session_ids:
        hold = yield from hold_on(session_id)
        if hold is not None:
            found[session_id] = hold[0]
    return found


def drop_hold(session_id: SessionId, tag: str) -> Job[None]:
    """Delete the tag of a hold on a session that nobody can read, since its key was forgotten."""
    yield Lock((session_id,))
    rows = yield Select("session", ("sid",), {"id": str(session_id)})
    if not rows:
        raise SessionNotFound(session_id)
    place = {"sid": rows[0][0]}
    if not (yield from _is_forgotten(place)):
        raise InvalidData("$.session_id", f"session {session_id!r} can be read; save it without the tag {tag!r}")
    tags = sorted(each for (each,) in (yield Select("tag", ("tag",), place)) if is_hold(each))
    if tag not in tags:
        raise no_hold(session_id, tag, tags)
    yield Delete("tag", {**place, "tag": tag})


def _is_forgotten(place: Where) -> Job[bool]:
    """Tell whether the newest head of a session is sealed with a key that was forgotten."""
    try:
        yield Select("head", ("crc", "body"), place, order="-version", limit=1)
    except KeyForgotten:
        return True
    return False


def held_beside(owner: str) -> Job[dict[SessionId, str]]:
    """Return the sessions of others that are under hold and show what an owner has said, each with the tag.

    What they show of sessions that were erased counts too: nothing in the store tells whose those were.
    """
    found: dict[SessionId, str] = {}
    for tag, sid in (yield from _hold_tags()):
        rows = yield Select("session", ("id", "owner"), {"sid": sid})
        for session_id, whose in rows:
            if whose != owner and (yield from _shows_anything_of(owner, session_id, sid)):
                found.setdefault(stored_id(session_id), tag)
    return found


def _hold_tags() -> Job[list[tuple[str, int]]]:
    rows = [*(yield Select("tag", ("tag", "sid"), {"tag": HOLD}))]
    rows += yield Select("tag", ("tag", "sid"), {"tag >": HOLD, "tag <": f"{HOLD};"})  # ";" comes after ":"
    return [(tag, sid) for tag, sid in rows if is_hold(tag)]


def _shows_anything_of(owner: str, session_id: str, sid: int) -> Job[bool]:
    for log in sorted({log for log, _, _ in (yield from noted(session_id, sid))}, key=str):
        sids = [of for (of,) in (yield Select("log", ("sid",), {"log": log}))]
        owners = [whose for (whose,) in (yield Select("session", ("owner",), {"sid in": sids}))]
        if not owners or owner in owners:
            return True
    return False
