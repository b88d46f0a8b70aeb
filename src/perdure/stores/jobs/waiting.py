"""Sessions with waiting items: finding them, the last look into an inbox, and limits on what waits or runs."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable
from itertools import chain, zip_longest
from typing import Any

from perdure.errors import CorruptRecord, OwnerBusy, QueueFull, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.session import SessionStatus
from perdure.protocols import Waiting
from perdure.stores.claims import Look
from perdure.stores.engine import Clock, Job, Lock, Row, Select, Where
from perdure.stores.jobs.claiming import holder_of, require_absent, stored_id

COLUMNS = ("id", "owner", "priority", "since", "inbox_end", "taken", "sid")
WAITS = {"inbox_end > taken": True}
_ACTIVE: Where = {"status": SessionStatus.ACTIVE.value, **WAITS}
_FREE: Where = {**_ACTIVE, "claim": None}
_HELD: Where = {"status": SessionStatus.SUSPENDED.value, **WAITS}
_ORDER = "-priority since sid"


def waiting(limit: int, idle_only: bool) -> Job[list[Waiting]]:
    """Return the sessions with waiting items, the most urgent first, then the longest waiting."""
    if not idle_only:
        return [waiting_of(row) for row in (yield Select("session", COLUMNS, _ACTIVE, order=_ORDER, limit=limit))]
    free = yield Select("session", COLUMNS, _FREE, order=_ORDER, limit=limit)
    # Few sessions have a claim, and most claims are still held. Those that have lapsed are put among the others.
    claimed = yield Select("session", (*COLUMNS, "claim", "expires"), {**_ACTIVE, "claim !=": None})
    ((time,),) = (yield Clock()) if claimed else [(0.0,)]
    look = Look()
    lapsed = [row[:-2] for row in claimed if row[-1] <= time or look.finds_gone(holder_of(row[0], row[-2]))]
    return [waiting_of(row) for row in merged(free, lapsed)[:limit]]


def held(limit: int) -> Job[list[Waiting]]:
    """Return the suspended sessions with waiting items, the most urgent first, then the longest waiting."""
    return [waiting_of(row) for row in (yield Select("session", COLUMNS, _HELD, order=_ORDER, limit=limit))]


def merged(free: Iterable[Row], lapsed: Iterable[Row]) -> list[Row]:
    """Return rows of both lists in the order of urgency."""
    rows = [*free, *lapsed]
    rows.sort(key=lambda row: (-row[2], row[3], row[6]))
    return rows


def waiting_of(row: Row) -> Waiting:
    session_id, owner, priority, since, end, taken, _ = row
    if since is None:
        raise CorruptRecord(session_id, "since when it waits", "it is missing")
    return Waiting(stored_id(session_id), owner, priority, since, end - taken)


def in_turn(limit: int, after: str, skip: Collection[str], not_of: Collection[str]) -> Job[list[Waiting]]:
    """Return waiting sessions without a claim, the most urgent first. Of equally urgent ones, owners take turns."""
    return (yield from InTurn(after, skip, not_of).found(limit))


class InTurn:
    """A search for sessions owner by owner. An engine may override the statements."""

    def __init__(self, after: str, skip: Collection[str], not_of: Collection[str]) -> None:
        self._after = after
        self._skip = skip
        self._not_of = not_of

    def highest(self, below: int | None) -> Any:
        """Return the statement for the highest priority, or the highest below another."""
        where = _ACTIVE if below is None else {**_ACTIVE, "priority <": below}
        return Select("session", ("priority",), where, order="-priority", limit=1)

    def next_owner(self, priority: int, after: str) -> Any:
        where = {**_ACTIVE, "priority": priority, "owner >": after}
        return Select("session", ("owner",), where, order="owner", limit=1)

    def lane(self, priority: int, owner: str | None, limit: int) -> Any:
        """Return the statement for the sessions of an owner, the longest waiting first."""
        where = {**_FREE, "priority": priority, "owner": owner}
        return Select("session", COLUMNS, where, order="since sid", limit=limit)

    def found(self, limit: int) -> Generator[Any, list[Row], list[Waiting]]:
        found: list[Waiting] = []
        priority: int | None = None
        while len(found) < limit and (rows := (yield self.highest(priority))):
            priority = rows[0][0]
            found += yield from self._of_priority(rows[0][0], limit - len(found))
        return found

    def _of_priority(self, priority: int, limit: int) -> Generator[Any, list[Row], list[Waiting]]:
        """Return the first session of each owner, then the second of each, and so on.

        Owners after `after` come first, then sessions without an owner, then the other owners.
        """
        lanes: list[list[Row]] = []
        owner: str | None = self._after
        is_round = False
        while len(lanes) < limit:
            # From one owner to the next by an index: an owner with ten thousand sessions costs no more than others.
            rows = yield self.next_owner(priority, owner or "")
            owner = rows[0][0] if rows else None
            if is_round and (owner is None or owner > self._after):
                break
            is_round = is_round or owner is None
            if owner not in self._not_of:
                rows = yield self.lane(priority, owner, limit + len(self._skip))
                lanes += [usable] if (usable := [row for row in rows if row[0] not in self._skip]) else []
        in_order = chain.from_iterable(zip_longest(*lanes))
        return [waiting_of(row) for row in in_order if row is not None][:limit]


def has_waiting(session_id: SessionId) -> Job[bool]:
    """Tell whether an item waits, under the lock that a post takes."""
    yield Lock((session_id,))
    rows = yield Select("session", ("inbox_end", "taken"), {"id": str(session_id)})
    if not rows:
        yield from require_absent(session_id)
        raise SessionNotFound(session_id)
    end, taken = rows[0]
    return bool(end > taken)


def require_room(session_id: str, owner: str | None, waits: int, most: int | None, of_owner: int | None) -> Job[None]:
    """Raise QueueFull if `most` items wait in the session, or `of_owner` in all sessions of the owner.

    `waits` is the number of items that wait in the session.
    """
    if most is not None and waits >= most:
        raise QueueFull(session_id, most)
    if of_owner is None or owner is None:
        return
    yield Lock((), owner=owner)
    # Each of these sessions has at least one item, so this many sessions are enough to know.
    rows = yield Select("session", ("inbox_end", "taken"), {"owner": owner, **WAITS}, limit=of_owner)
    if sum(end - taken for end, taken in rows) >= of_owner:
        raise QueueFull(session_id, of_owner, owner)


def require_seat(session_id: str, most: int) -> Job[None]:
    """Raise OwnerBusy if `most` claims are held on other sessions of the same owner."""
    rows = yield Select("session", ("owner",), {"id": str(session_id)})
    owner = rows[0][0] if rows else None
    if owner is None:
        return
    yield Lock((), owner=owner)
    claims = yield Select("session", ("id", "claim", "expires"), {"owner": owner, "claim !=": None})
    ((time,),) = yield Clock()
    others = [(key, claim) for key, claim, expires in claims if key != session_id and expires > time]
    look = Look()
    if sum(not look.finds_gone(holder_of(key, claim)) for key, claim in others) >= most:
        raise OwnerBusy(session_id, owner, most)
