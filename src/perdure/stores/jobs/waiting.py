"""What waits in inboxes: which sessions, the last look into one, and how much may wait or be run at once."""

from __future__ import annotations

from collections.abc import Iterable

from perdure.errors import CorruptRecord, OwnerBusy, QueueFull, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.protocols import Waiting
from perdure.stores.engine import Clock, Job, Lock, Row, Select, Where
from perdure.stores.jobs.claiming import holder_of, require_absent

COLUMNS = ("id", "owner", "priority", "since", "inbox_end", "taken", "sid")
WAITS = {"inbox_end > taken": True}
_ACTIVE: Where = {"status": SessionStatus.ACTIVE.value, **WAITS}
_ORDER = "-priority since sid"


def waiting(limit: int, idle_only: bool) -> Job[list[Waiting]]:
    """Return the sessions that wait, the most urgent first, then the longest waiting."""
    if not idle_only:
        return [waiting_of(row) for row in (yield Select("session", COLUMNS, _ACTIVE, order=_ORDER, limit=limit))]
    free = yield Select("session", COLUMNS, {**_ACTIVE, "claim": None}, order=_ORDER, limit=limit)
    # Few have a claim, of which most stand: those that have lapsed are put among the others.
    claimed = yield Select("session", (*COLUMNS, "claim", "expires"), {**_ACTIVE, "claim !=": None})
    ((time,),) = (yield Clock()) if claimed else [(0.0,)]
    lapsed = [row[:-2] for row in claimed if row[-1] <= time or holder_of(row[0], row[-2]).is_gone]
    return [waiting_of(row) for row in merged(free, lapsed)[:limit]]


def merged(free: Iterable[Row], lapsed: Iterable[Row]) -> list[Row]:
    """Return rows of both lists in the order of urgency."""
    rows = [*free, *lapsed]
    rows.sort(key=lambda row: (-row[2], row[3], row[6]))
    return rows


def waiting_of(row: Row) -> Waiting:
    session_id, owner, priority, since, end, taken, _ = row
    if since is None:
        raise CorruptRecord(session_id, "since when it waits", "it is missing")
    return Waiting(SessionId(session_id), owner, priority, since, end - taken)


def has_waiting(session_id: SessionId) -> Job[bool]:
    """Tell whether something waits, under the lock that a post takes."""
    yield Lock((session_id,))
    rows = yield Select("session", ("inbox_end", "taken"), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    end, taken = rows[0]
    return bool(end > taken)


def require_room(session_id: str, owner: str | None, waits: int, most: int | None, of_owner: int | None) -> Job[None]:
    """Raise QueueFull if so many items wait: `waits` is how many do in the session itself."""
    if most is not None and waits >= most:
        raise QueueFull(session_id, most)
    if of_owner is None or owner is None:
        return
    yield Lock((), owner=owner)
    # As many sessions have at least as many items.
    rows = yield Select("session", ("inbox_end", "taken"), {"owner": owner, **WAITS}, limit=of_owner)
    if sum(end - taken for end, taken in rows) >= of_owner:
        raise QueueFull(session_id, of_owner, owner)


def require_seat(session_id: str, most: int) -> Job[None]:
    """Raise OwnerBusy if so many claims stand on other sessions of the same owner."""
    rows = yield Select("session", ("owner",), {"id": str(session_id)})
    owner = rows[0][0] if rows else None
    if owner is None:
        return
    yield Lock((), owner=owner)
    claims = yield Select("session", ("id", "claim", "expires"), {"owner": owner, "claim !=": None})
    ((time,),) = yield Clock()
    others = [(key, claim) for key, claim, expires in claims if key != session_id and expires > time]
    if sum(not holder_of(key, claim).is_gone for key, claim in others) >= most:
        raise OwnerBusy(session_id, owner, most)
