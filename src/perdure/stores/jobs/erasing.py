"""Erasing sessions, but for those of their messages that another session's versions show; and what is left of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

from perdure.errors import SessionBusy, SessionNotFound
from perdure.model.ids import SessionId
from perdure.stores.engine import Count, Delete, Job, Lock, Select, Update
from perdure.stores.jobs.claiming import Facts, facts_of, require_free
from perdure.stores.jobs.saving import owner_of_log

# What a session has rows in, its own last: one who is killed in the middle finds it again.
_TABLES = ("head", "batch", "run", "inbox", "key", "tag", "uses", "session")
_AT_ONCE = 1_000


def delete(session_id: SessionId) -> Job[None]:
    yield Lock((session_id,), "alone")
    yield from _erase((yield from _free(session_id)))
    yield from count_erasure()


def delete_many(session_ids: Sequence[SessionId]) -> Job[list[SessionId]]:
    """Erase sessions, and return which; those that are being run, or gone already, are left."""
    yield Lock(tuple(session_ids), "alone")
    erased: list[SessionId] = []
    for session_id in session_ids:
        try:
            sid = yield from _free(session_id)
        except (SessionBusy, SessionNotFound):
            continue
        yield from _erase(sid)
        yield from count_erasure()
        erased.append(session_id)
    return erased


def gc() -> Job[int]:
    """Erase what is left of erased sessions and shown by nobody. Return how many messages that were."""
    yield Lock((), "alone")
    logs = yield Select("log", ("log", "sid"), order="log")
    there = {sid for (sid,) in (yield Select("session", ("sid",)))}
    erased = 0
    for log, sid in logs:
        if sid not in there:
            ((before,),) = yield Count("msg", {"log": log})
            yield from _erase_unshown(log)
            ((after,),) = yield Count("msg", {"log": log})
            erased += before - after
    yield from _erase_unused()
    # Even if there was nothing: what is indexed from here on waits until all traces are gone.
    yield from count_erasure()
    return erased


def count_erasure() -> Job[None]:
    """Let everybody know that what they have at hand may have been erased."""
    yield Update("meta", {"value +": 1}, {"key": "erasures"})


def forget_unused(hashes: Iterable[str]) -> Job[None]:
    """Erase those of some values that no session uses any more."""
    left = iter(hashes)
    while some := list(islice(left, _AT_ONCE)):
        used = {key for (key,) in (yield Select("uses", ("hash",), {"hash in": some}))}
        if unused := [key for key in some if key not in used]:
            yield Delete("value", {"hash in": unused})


def _free(session_id: SessionId) -> Job[int]:
    """Return the number of a session that may be erased. One whose run was interrupted may be."""
    facts: Facts = yield from facts_of(session_id)
    if facts.sid is None:
        raise SessionNotFound(session_id)
    require_free(session_id, facts)
    return facts.sid


def _erase(sid: int) -> Job[None]:
    shown = yield Select("ref", ("log",), {"child": sid})
    own = yield Select("log", ("log",), {"sid": sid})
    hashes = yield Select("uses", ("hash",), {"sid": sid})
    yield Delete("ref", {"child": sid})
    for table in _TABLES:
        yield Delete(table, {"sid": sid})
    for (log,) in sorted({*own, *shown}):
        yield from _erase_unshown(log)
    yield from forget_unused(key for (key,) in hashes)


def _erase_unshown(log: int | str) -> Job[None]:
    """Erase what nobody shows of a log whose session is gone."""
    if (yield from owner_of_log(log)) is not None:
        return
    stretches = yield Select("ref", ("start", "stop"), {"log": log}, order="start")
    position = 0
    for start, stop in stretches:
        if position < start:
            yield Delete("msg", {"log": log, "pos >=": position, "pos <": start})
        position = max(position, stop)
    yield Delete("msg", {"log": log, "pos >=": position})
    if not stretches:
        yield Delete("log", {"log": log})


def _erase_unused() -> Job[None]:
    """Erase all values that no session uses, a page of them at a time: a store may hold millions."""
    last = ""
    while page := (yield Select("value", ("hash",), {"hash >": last}, order="hash", limit=_AT_ONCE)):
        yield from forget_unused(key for (key,) in page)
        last = page[-1][0]
