"""Lines of forks: the stretches of others' logs that a session shows, as noted in its own rows and those of its line.

The first version of a fork of a fork shows all that the first version of the fork before it showed, and a little more.
Only the difference is noted: the fork's row names the other session as its `line`. These rules always hold:

- a line is a session that is there, with a lower number;
- the fork's first version shows all that its line's first version shows of others;
- what the fork's first version shows of others is in its own rows without a `since`, or in its line's first version;
- what later versions came to show of others is in its own rows with a `since`.

A session's first version is the oldest that is kept, since older ones may have been forgotten. A session that has
forgotten versions has rows, each with a `since`, for what it keeps of its own logs. If a session has rows for a log of
its own, everything else in that log may be gone, or be kept for others only.

The rows of all sessions together say what is shown at all, and erasures use them. To find out who shows it, the lines
have to be followed as well.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from perdure.errors import CorruptRecord, KeyUnavailable
from perdure.model.transcript import LogRef
from perdure.stores.cache import CachedSession
from perdure.stores.engine import Job, Select, Where
from perdure.stores.format.placement import foreign_stretches
from perdure.stores.format.rows import LAST, Stretch
from perdure.stores.jobs.values import gather
from perdure.stores.tapes import without

Stretches = frozenset[Stretch]
_FEW, _MANY = 8, 1_000


class Inherited(NamedTuple):
    """The stretches that a new fork need not note, since its line has them."""

    line: int | None = None
    shown: Stretches = frozenset()


def inherited(parent_id: str, named: Stretches, known: CachedSession | None, origin: str) -> Job[Inherited]:
    """Return the stretches that a new fork, which names these, inherits from the session it is forked from.

    `known` is that session at hand, if nothing was erased since.
    """
    try:
        rows = yield Select("session", ("sid", "log", "created", "line"), {"id": parent_id})
        if not rows:
            return Inherited()
        sid, log, created, line = rows[0]
        shown = None
        if known is not None and known.session.info.created_at.timestamp() == created:
            shown = known_beginning(known, LogRef(origin, log))
        if shown:
            # A session from another store has copies of others' messages in logs of its own.
            own = {log for (log,) in (yield Select("log", ("log",), {"sid": sid}))}
            shown = frozenset(each for each in shown if each[0] not in own) if len(own) > 1 else shown
        if shown is None:
            shown = yield from began_with(parent_id, sid, line)
    except (CorruptRecord, KeyUnavailable):
        return Inherited()  # a fork of a damaged session notes all by itself
    # A fork that leaves out some of what the parent began with would inherit stretches that it does not show.
    return Inherited(sid, shown) if shown and not uncovered(shown, named) else Inherited()


def known_beginning(known: CachedSession, own: LogRef) -> Stretches | None:
    """Return the stretches of others' logs in the first version of a session at hand; None if they are not known."""
    if known.began_with is None and known.session.version == 1:
        return frozenset(foreign_stretches(known.session, own))
    return known.began_with


def began_with(session_id: str, sid: int, line: int | None) -> Job[Stretches]:
    """Return the stretches of others' logs that the first version of a session shows."""
    if line is None:
        return frozenset((yield Select("ref", ("log", "start", "stop"), {"child": sid, "since": None})))
    # By its head: the line may be long, and each session on it would take a statement.
    return (yield from shown_by_first(session_id, sid))


def shown_by_first(session_id: str, sid: int) -> Job[Stretches]:
    """Return the stretches of others' logs that the head of the first version names.

    Raise CorruptRecord if the head is damaged.
    """
    from perdure.stores.format.renaming import OpenHead, RenamedBlocks  # imported late: a first save needs neither
    from perdure.stores.jobs.oldest import oldest_head

    head = yield from oldest_head(session_id, sid)
    found: set[Stretch] = set()

    def meet(log: int | str, start: int, stop: int) -> int | str:
        found.add((log, start, stop))
        return log

    OpenHead(head.raw, head, (yield from gather(session_id, head))).renamed(RenamedBlocks(meet))
    own = {log for (log,) in (yield Select("log", ("log",), {"sid": sid}))}
    return frozenset(stretch for stretch in found if stretch[0] not in own)


def noted_by_owners(owners: Mapping[int | str, int]) -> Job[set[int | str]]:
    """Return the logs among these, given with their sessions, of which their own session has forgotten something."""
    found: set[int | str] = set()
    for where in _of_children(sorted({*owners.values()})):
        rows = yield Select("ref", ("log", "child"), where)
        found |= {log for log, child in rows if owners.get(log) == child}
    return found


def _of_children(sids: Sequence[int]) -> Iterable[Where]:
    """Return the conditions for rows of sessions: one by one if they are few, which every engine has an index for."""
    if len(sids) <= _FEW:
        return [{"child": sid} for sid in sids]
    return [{"child in": sids}] if len(sids) <= _MANY else [{}]


def own_stretches(sid: int) -> Job[list[Stretch]]:
    """Return the stretches that a session has of its own logs: the whole log, or what it keeps after forgetting."""
    logs = [log for (log,) in (yield Select("log", ("log",), {"sid": sid}))]
    rows = yield Select("ref", ("log", "start", "stop"), {"child": sid})
    kept = [row for row in rows if row[0] in logs]
    noted = {log for log, _, _ in kept}
    return [*((log, 0, LAST) for log in logs if log not in noted), *kept]


def noted(session_id: str, sid: int) -> Job[set[Stretch]]:
    """Return all stretches that a session is noted to show of others, in its own rows or by its line."""
    found = {*(yield Select("ref", ("log", "start", "stop"), {"child": sid}))}
    for (line,) in (yield Select("session", ("line",), {"sid": sid})):
        if line is not None:
            found |= yield from shown_by_first(session_id, sid)
    return found


def uncovered(stretches: Stretches, others: Stretches) -> list[Stretch]:
    """Return the parts of these stretches that are not in the others."""
    # Most stretches are in both, and equal. So few logs are left to be compared in detail.
    left = stretches - others
    logs = {log for log, _, _ in left}
    return [*without(left, [stretch for stretch in others if stretch[0] in logs])]


def heirs_of(sids: Collection[int]) -> Job[list[tuple[int, str]]]:
    """Return the numbers and ids of the sessions whose line is one of these."""
    return (yield Select("session", ("sid", "id"), {"line in": sorted(sids)}, order="sid")) if sids else []


def with_descendants(sids: Iterable[int]) -> Job[set[int]]:
    """Return sessions, and all sessions whose lines lead to them, by one statement for each generation."""
    found = {*sids}
    young = found
    while young:
        young = {sid for sid, _ in (yield from heirs_of(young))} - found
        found |= young
    return found
