"""Retention: sessions that were kept for long enough are erased, unless they are still in use.

The sessions that are due are found beforehand. They are checked again here, inside the transaction that erases them. A
session stays if it has changed since, if it is running or waits for something, or if it is under hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from perdure.errors import (
    CorruptRecord,
    KeyUnavailable,
    PerdureError,
    RunInterrupted,
    SessionBusy,
    SessionHeld,
    SessionNotFound,
)
from perdure.model.ids import SessionId
from perdure.model.retention import KEEP_MARK, Retention, rule_of_mark
from perdure.model.session import AgentSessionInfo, SessionStatus
from perdure.protocols import Due, Erased, Left, WhyLeft
from perdure.stores.engine import Interfered, Job, Select
from perdure.stores.format.heads import StoredHead, decode_info, unpacked_head
from perdure.stores.jobs.claiming import Facts, facts_of, require_free
from perdure.stores.jobs.erasing import Erasure, count_erasure, lock_with_callers, tree_of
from perdure.stores.jobs.forgetting import forget
from perdure.stores.jobs.holding import hold_on
from perdure.stores.jobs.rehearsing import Rehearsal
from perdure.stores.jobs.saving import Pack
from perdure.stores.jobs.tally import Tally
from perdure.stores.jobs.values import gather

REFUSALS = (SessionBusy, SessionHeld, SessionNotFound, CorruptRecord, KeyUnavailable)
"""The errors with which a session is left as it is."""
_BEHIND_MARKS = KEEP_MARK[:-1] + chr(ord(KEEP_MARK[-1]) + 1)


def own_rules() -> Job[list[Retention]]:
    """Return all rules that sessions have of their own, each once."""
    found: list[Retention] = []
    # From one mark to the next by the index: a rule costs one step, no matter how many sessions have it.
    last = KEEP_MARK
    where = {"tag <": _BEHIND_MARKS}
    while rows := (yield Select("tag", ("tag",), {"tag >": last, **where}, order="tag", limit=1)):
        last = rows[0][0]
        rule = rule_of_mark(last)
        found += [] if rule is None else [rule]
    return found


def overgrown(versions: int, after: str, limit: int) -> Job[tuple[list[AgentSessionInfo], str | None]]:
    """Return headers of sessions with more older versions than `versions`, and the `after` of the next page, or None.

    Sub-agents' sessions are left out, since they go with their callers'. So are those that cannot be read.
    """
    where = {"id >": after, "version >": versions + 1, "spawned": 0}
    rows = yield Select("session", ("id", "version"), where, order="id", limit=limit)
    found: list[AgentSessionInfo] = []
    for session_id, _ in rows:
        try:
            found += yield from _if_overgrown(session_id, versions)
        except (CorruptRecord, KeyUnavailable):  # the check reports it, and the others must be pruned all the same
            continue
    return found, rows[-1][0] if len(rows) == limit else None


def _if_overgrown(session_id: str, versions: int) -> Job[list[AgentSessionInfo]]:
    """Return the header of a session if it has more older versions than `versions`."""
    for sid, version in (yield Select("session", ("sid", "version"), {"id": session_id})):
        oldest = yield Select("head", ("version",), {"sid": sid}, order="version", limit=1)
        if oldest and version - oldest[0][0] > versions:
            rows = yield Select("head", ("crc", "body"), {"sid": sid, "version": version})
            bodies = [unpacked_head(body, crc, session_id, sid, version) for crc, body in rows]
            return [decode_info(body, session_id, version) for body in bodies]
    return []


def retire(due: Sequence[Due]) -> Job[Erased]:
    """Erase sessions that are due, with those of their sub-agents. Return those erased, and why others were left."""
    trees: dict[SessionId, list[SessionId]] = {}
    for each in due:
        trees[each.session_id] = yield from tree_of(each.session_id)
    yield from lock_with_callers([session_id for tree in trees.values() for session_id in tree])
    left: list[Left] = []
    going: dict[int, SessionId] = {}
    for each in due:
        if trees[each.session_id] != (yield from tree_of(each.session_id)):
            raise Interfered("there is one more session of a sub-agent, or one less")
        sids: dict[int, SessionId] = {}
        why = None
        for session_id in trees[each.session_id]:
            why = why or (yield from _why_not(session_id, each, sids))
        if why is not None:
            left.append(why)
        else:
            going |= sids
    tally = Tally()
    if going:
        erasure = Erasure(tally)
        yield from erasure.erase(going)
        yield from erasure.finish()
        for _ in going:
            yield from count_erasure()
    return Erased([*going.values()], left, tally.versions, tally.messages, tally.bytes)


def prune(due: Due, before: int, at: datetime, pack: Pack) -> Job[Erased]:
    """Forget the versions of a session before `before`, unless it has changed since it was found.

    Raise one of REFUSALS if the session stays as it is. So the transaction is undone, even halfway through the work.
    """
    yield from lock_with_callers([due.session_id])
    facts: Facts = yield from facts_of(due.session_id)
    if facts.sid is None or not _is_same(facts, due):
        return Erased(left=[Left(due.session_id, WhyLeft.CHANGED)])
    gone = yield from forget(due.session_id, before, at, pack)
    return Erased(pruned=[due.session_id], versions=gone.versions, messages=gone.messages, bytes=gone.bytes)


def rehearse(
    batches: Sequence[Sequence[Due]], prunes: Sequence[tuple[Due, int]], at: datetime, pack: Pack
) -> Job[Erased]:
    """Return the results that `retire` and `prune` would have, one after the other. Nothing is written."""
    rehearsal, found = Rehearsal(), list[Erased]()
    for batch in batches:
        found.append((yield from rehearsal.of(retire(batch))))
    for due, before in prunes:
        try:
            found.append((yield from rehearsal.of(prune(due, before, at, pack))))
        except REFUSALS as error:
            found.append(Erased(left=[left_by(due.session_id, error)]))
    return Erased.joined(found)


def _is_same(facts: Facts, due: Due) -> bool:
    return (facts.version, facts.created) == (due.version, due.created)


def _why_not(session_id: SessionId, due: Due, sids: dict[int, SessionId]) -> Job[Left | None]:
    """Return why a session of a tree stays, and the tree with it. If nothing keeps it, return None.

    Its number is added to `sids`.
    """
    try:
        facts: Facts = yield from facts_of(session_id)
        if facts.sid is None:
            return Left(due.session_id, WhyLeft.CHANGED)
        sids[facts.sid] = session_id
        if session_id == due.session_id and not _is_same(facts, due):
            return Left(due.session_id, WhyLeft.CHANGED)
        hold = yield from hold_on(session_id)
        if hold is not None:
            return Left(due.session_id, WhyLeft.HOLD, f"{hold[0]} on {hold[1]}")
        require_free(session_id, facts)
        if facts.claim is not None:
            return Left(due.session_id, WhyLeft.INTERRUPTED, _unless(session_id, due))
        if facts.is_waited_for:
            return Left(due.session_id, WhyLeft.QUEUED, _unless(session_id, due))
        if (yield Select("timer", ("timer",), {"sid": facts.sid}, limit=1)):
            return Left(due.session_id, WhyLeft.TIMER, _unless(session_id, due))
        if (yield from _waits_for_person(session_id, facts)):
            return Left(due.session_id, WhyLeft.APPROVAL, _unless(session_id, due))
    except (SessionBusy, CorruptRecord, KeyUnavailable) as error:
        return left_by(due.session_id, error)
    return None


def _unless(session_id: SessionId, due: Due) -> str:
    """Return the id of a session in a tree, or "" if it is the one that is due."""
    return "" if session_id == due.session_id else session_id


def left_by(session_id: SessionId, error: PerdureError) -> Left:
    match error:
        case SessionHeld(tag=tag, holder=holder):
            return Left(session_id, WhyLeft.HOLD, f"{tag} on {holder}")
        case RunInterrupted():
            return Left(session_id, WhyLeft.INTERRUPTED)
        case SessionBusy():
            return Left(session_id, WhyLeft.RUNNING)
        case CorruptRecord() | KeyUnavailable():
            return Left(session_id, WhyLeft.DAMAGED, error.what)
    return Left(session_id, WhyLeft.CHANGED)


def _waits_for_person(session_id: SessionId, facts: Facts) -> Job[bool]:
    """Tell whether the last run of a session waits for an approval, or for a result from outside."""
    ((status,),) = yield Select("session", ("status",), {"sid": facts.sid})
    if status != SessionStatus.SUSPENDED.value:
        return False
    where = {"sid": facts.sid, "version": facts.version}
    for crc, body in (yield Select("head", ("crc", "body"), where)):
        raw = unpacked_head(body, crc, session_id, facts.sid or 0, facts.version)
        head = StoredHead(raw, session_id, facts.version)
        run = head.run((yield from gather(session_id, head)))
        return run is not None and run.is_waiting
    raise CorruptRecord(session_id, f"head {facts.version}", "it is missing")
