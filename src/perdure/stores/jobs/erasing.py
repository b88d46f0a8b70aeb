"""Erasing sessions, except for messages that other sessions show, and erasing these once nobody shows them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice

from perdure.errors import SessionBusy, SessionConflict, SessionHeld, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import AgentSessionInfo
from perdure.stores.engine import Delete, Interfered, Job, Lock, Select, Update
from perdure.stores.format.rows import LAST, another_session
from perdure.stores.jobs import attachments
from perdure.stores.jobs.claiming import Facts, facts_of, require_free, stored_id
from perdure.stores.jobs.holding import callers_of, require_unheld
from perdure.stores.jobs.lines import heirs_of, noted_by_owners
from perdure.stores.jobs.saving import owner_of_log, write_refs
from perdure.stores.jobs.tally import Tally

# The tables with rows of a session, its own row last: after a kill in the middle, the session can be erased again.
_TABLES = ("head", "batch", "run", "inbox", "key", "sketch", "timer", "tag", "uses", "session")
_AT_ONCE = 1_000


def delete(session_id: SessionId, expected: AgentSessionInfo | None = None) -> Job[None]:
    """Erase a session. Raise SessionConflict if it is not the expected one, or not of the expected version."""
    yield from lock_with_callers([session_id])
    if expected is not None:
        yield from _require_same(expected)
    yield from _erase([(yield from _free(session_id))])


def delete_many(session_ids: Sequence[SessionId]) -> Job[list[SessionId]]:
    """Erase sessions, and return their ids. Those that are running, under hold, or gone already are left out.

    So are the callers of these: without its caller, no rule and no verb would find a sub-agent's session again.
    """
    yield from lock_with_callers(session_ids)
    free: dict[int, SessionId] = {}
    left: list[SessionId] = []
    for session_id in session_ids:
        try:
            free.setdefault((yield from _free(session_id)), session_id)
        except (SessionBusy, SessionHeld):
            left.append(session_id)
        except SessionNotFound:
            continue
    callers = {*(yield from callers_of(left))}
    free = {sid: session_id for sid, session_id in free.items() if session_id not in callers}
    yield from _erase(free)
    return [*free.values()]


def delete_tree(session_id: SessionId) -> Job[list[SessionId]]:
    """Erase a session and those of its sub-agents, and return their ids. None goes if one is running or under hold."""
    tree = yield from tree_of(session_id)
    yield from lock_with_callers(tree)
    if tree != (yield from tree_of(session_id)):
        raise Interfered("there is one more session of a sub-agent, or one less")
    sids: list[int] = []
    for each in tree:
        sids.append((yield from _free(each)))
    yield from _erase(sids)
    return tree


def lock_with_callers(session_ids: Sequence[SessionId]) -> Job[None]:
    """Lock sessions that will be erased, and their callers. A hold on a caller is also on its sub-agents."""
    callers = yield from callers_of(session_ids)
    yield Lock(tuple(dict.fromkeys((*session_ids, *callers))))


def tree_of(session_id: SessionId) -> Job[list[SessionId]]:
    """Return the ids of a session, its sub-agents', and theirs. Each comes after those that it has spawned."""
    found = last = {str(session_id): None}
    while last:
        rows = yield Select("session", ("id",), {"parent in": [*last], "spawned": 1}, order="sid")
        last = {each: None for (each,) in rows if each not in found}
        found = found | last
    return [stored_id(each) for each in reversed(found)]


def _erase(sids: Collection[int]) -> Job[None]:
    erasure = Erasure()
    yield from erasure.erase(sids)
    yield from erasure.finish()
    for _ in sids:
        yield from count_erasure()


def gc() -> Job[int]:
    """Erase what is left of erased sessions and shown by nobody. Return the number of messages erased."""
    # Most is read before the gate is shut, since others wait while it is.
    logs = yield Select("log", ("log", "sid"), order="log")
    there = {sid for (sid,) in (yield Select("session", ("sid",)))}
    unused = yield from _unused_values()
    unused_files = {*(yield from attachments.unused())}
    yield Lock((), "alone")
    in_part = yield from noted_by_owners({log: sid for log, sid in logs if sid in there})
    tally = Tally()
    for log, sid in logs:
        if sid not in there or log in in_part:
            unused_files |= yield from attachments.attached_to([log])
            yield from _erase_unshown(log, tally)
    yield from forget_unused(unused)
    yield from attachments.forget_unused(sorted(unused_files))
    # Even if nothing was erased: messages that are indexed from here on wait until all traces are gone.
    yield from count_erasure()
    return tally.messages


def count_erasure() -> Job[None]:
    """Count an erasure, so that all processes drop sessions at hand, which may have been erased."""
    yield Update("meta", {"value +": 1}, {"key": "erasures"})


def forget_unused(hashes: Iterable[str], tally: Tally | None = None) -> Job[None]:
    """Erase the values among these that no session uses any more."""
    left = iter(hashes)
    while some := list(islice(left, _AT_ONCE)):
        used = {key for (key,) in (yield Select("uses", ("hash",), {"hash in": some}))}
        if unused := [key for key in some if key not in used]:
            if tally is not None:
                rows = yield Select("value", ("body",), {"hash in": unused}, lenient=True)
                tally.add(body for (body,) in rows)
            yield Delete("value", {"hash in": unused})


def _require_same(expected: AgentSessionInfo) -> Job[None]:
    """Raise SessionConflict if the session has changed, or if another one has its id."""
    facts: Facts = yield from facts_of(expected.id)
    if facts.sid is not None and facts.version != expected.version:
        raise SessionConflict(expected.id, expected.version, facts.version)
    if facts.sid is not None and facts.created != expected.created_at.timestamp():
        raise another_session(expected)


def _free(session_id: SessionId) -> Job[int]:
    """Return the number of a session that may be erased. That includes one whose run was interrupted."""
    facts: Facts = yield from facts_of(session_id)
    if facts.sid is None:
        raise SessionNotFound(session_id)
    yield from require_unheld([session_id])
    require_free(session_id, facts)
    return facts.sid


Shown = dict[int | str, list[tuple[int, int]]]
"""The stretches of logs that are shown, without logs of which their own sessions have all."""


class Erasure:
    """An erasure of sessions. Most of the work is done before the gate is shut, since all others wait while it is."""

    def __init__(self, tally: Tally | None = None) -> None:
        self._logs: set[int | str] = set()
        self._hashes: set[str] = set()
        self._files: set[str] = set()
        self._shown: Shown = {}
        self._sids: set[int] = set()
        self._tally = tally

    def erase(self, sids: Collection[int]) -> Job[None]:
        # A fork before the session that it is forked from: it need not inherit rows that go with it anyway.
        for sid in sorted(sids, reverse=True):
            yield from self.bequeath(sid)
            yield from self._erase(sid)

    def bequeath(self, sid: int) -> Job[None]:
        """Copy a session's rows to the forks whose line it is, before it is erased."""
        self._sids.add(sid)
        heirs = yield from heirs_of([sid])
        if not heirs:
            return
        yield Lock(tuple(session_id for _, session_id in heirs))
        if heirs != (yield from heirs_of([sid])):
            raise Interfered("another erasure has changed who the heirs are")
        rows = yield Select("ref", ("log", "start", "stop"), {"child": sid, "since": None})
        for heir, _ in heirs:
            yield from write_refs(heir, rows)
        ((line,),) = yield Select("session", ("line",), {"sid": sid})
        yield Update("session", {"line": line}, {"line": sid})

    def _erase(self, sid: int) -> Job[None]:
        if self._tally is not None:
            yield from self._tally.measure_session(sid)
        shown = yield Select("ref", ("log",), {"child": sid})
        own = yield Select("log", ("log",), {"sid": sid})
        hashes = yield Select("uses", ("hash",), {"sid": sid})
        yield Delete("ref", {"child": sid})
        for table in _TABLES:
            yield Delete(table, {"sid": sid})
        yield from self.erase_unshown({log for (log,) in (*own, *shown)})
        self.leave_values(key for (key,) in hashes)

    def erase_unshown(self, logs: Collection[int | str]) -> Job[None]:
        """Erase the parts of logs that nobody shows, unless their own sessions have all of them."""
        now_shown = yield from _shown_of(sorted(logs, key=str))
        self._files |= yield from attachments.attached_to([*now_shown])
        for log, stretches in now_shown.items():
            yield from _erase_beside(log, stretches, self._tally)
        self._logs |= {*logs}
        self._shown |= now_shown

    def leave_values(self, hashes: Iterable[str]) -> None:
        """Add values that a session does not use any more. `finish` erases those that no session uses."""
        self._hashes |= {*hashes}

    def leave_files(self, hashes: Iterable[str]) -> None:
        """Add images and files that a session does not show any more. `finish` erases those that no message names."""
        self._files |= {*hashes}

    def finish(self) -> Job[None]:
        """Shut the gate, and erase what others may have been about to use. Raise Interfered if they have used it."""
        yield Lock((), "alone")
        # All of this was read before the gate was shut, so it is read again now.
        if (yield from heirs_of(self._sids)):
            raise Interfered("there is one more fork whose line is to go")
        for log, stretches in (yield from _shown_of(sorted(self._logs, key=str))).items():
            before = self._shown.get(log)
            if before is not None and not {*stretches} <= {*before}:
                raise Interfered(f"log {log} is shown by one more session")
            if before != stretches:
                yield from _erase_beside(log, stretches, self._tally)
            if not stretches:
                yield Delete("log", {"log": log})
        yield from forget_unused(sorted(self._hashes), self._tally)
        yield from attachments.forget_unused(sorted(self._files), self._tally)


def _shown_of(logs: Sequence[int | str]) -> Job[Shown]:
    """Return the shown stretches of logs whose sessions are gone, or have forgotten some of the log."""
    owners = dict((yield Select("log", ("log", "sid"), {"log in": logs}))) if logs else {}
    sids = sorted({*owners.values()})
    there = {sid for (sid,) in (yield Select("session", ("sid",), {"sid in": sids}))} if sids else set()
    in_part = yield from noted_by_owners({log: sid for log, sid in owners.items() if sid in there})
    found: Shown = {log: [] for log in logs if owners.get(log) not in there or log in in_part}
    if found:
        asked = Select("ref", ("log", "start", "stop"), {"log in": [*found]}, order="log start stop")
        for log, start, stop in (yield asked):
            found[log].append((start, stop))
    return found


def _erase_unshown(log: int | str, tally: Tally) -> Job[None]:
    """Erase the parts of a log that nobody shows, unless its own session has all of it."""
    for each, stretches in (yield from _shown_of([log])).items():
        yield from _erase_beside(each, stretches, tally)
        if not stretches:
            yield Delete("log", {"log": log})


def _erase_beside(log: int | str, stretches: Sequence[tuple[int, int]], tally: Tally | None = None) -> Job[None]:
    """Erase everything except these stretches of a log. If its session is gone, that includes files of its inbox."""
    if (yield Select("attached", ("pos",), {"log": log}, limit=1)):
        for low, high in _gaps(stretches, 0 if (yield from owner_of_log(log)) is not None else -LAST):
            yield Delete("attached", {"log": log, "pos >=": low, "pos <": high})
    for low, high in _gaps(stretches, 0):
        if tally is not None:
            yield from tally.measure(log, low, high)
        yield Delete("msg", {"log": log, "pos >=": low, "pos <": high})


def _gaps(stretches: Sequence[tuple[int, int]], position: int) -> Iterator[tuple[int, int]]:
    """Yield the gaps between stretches, beginning at `position`, up to the end of all logs."""
    for start, stop in stretches:
        if position < start:
            yield position, start
        position = max(position, stop)
    yield position, LAST


def _unused_values() -> Job[list[str]]:
    """Return the values that no session uses."""
    # By pages of hashes: a store may have millions of values, most of them in use.
    found: list[str] = []
    last = ""
    while page := [
        key for (key,) in (yield Select("value", ("hash",), {"hash >": last}, order="hash", limit=_AT_ONCE))
    ]:
        used = {key for (key,) in (yield Select("uses", ("hash",), {"hash in": page}))}
        found += [key for key in page if key not in used]
        last = page[-1]
    return found
