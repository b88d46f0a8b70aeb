"""Items that wait in inboxes, and the rates that processes share, by one statement each."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from msgspec.structs import replace

from perdure.errors import SessionNotFound
from perdure.protocols import Waiting
from perdure.stores.claims import Look
from perdure.stores.jobs.claiming import holder_of
from perdure.stores.jobs.rates import micros, wait_of
from perdure.stores.jobs.waiting import InTurn, merged, waiting_of
from perdure.stores.postgres.link import Link, ask
from perdure.stores.postgres.rows import NOW, given_time, plain, restored

# Rows of `waiting` are read in order, as far as the page goes. Each is checked in `session`, which is the truth.
# The limit is part of the text: a plan for an unknown limit would read all waiting rows, and sort them.
_ROWS = """
    SELECT session.id, session.owner, waiting.priority, waiting.since, session.inbox_end, session.taken, waiting.sid
"""
_FREE = f"""
    {_ROWS} FROM waiting JOIN session ON session.sid = waiting.sid
    WHERE waiting.status = 'active' AND session.inbox_end > session.taken {{idle}}
    ORDER BY waiting.priority DESC, waiting.since, waiting.sid LIMIT {{limit:d}}
"""
# OFFSET 0 makes the planner look rows up one by one, however many it takes them for.
_CLAIMED = f"""
    {_ROWS}, convert_to(session.claim, 'UTF8'), session.expires <= coalesce(%(at)s::float8, {NOW})
    FROM claimed
    CROSS JOIN LATERAL (SELECT * FROM waiting AS of WHERE of.sid = claimed.sid OFFSET 0) AS waiting
    CROSS JOIN LATERAL (SELECT * FROM session AS of WHERE of.sid = claimed.sid OFFSET 0) AS session
    WHERE waiting.status = 'active' AND session.inbox_end > session.taken AND session.claim IS NOT NULL
"""
_HELD = f"""
    {_ROWS} FROM waiting JOIN session ON session.sid = waiting.sid
    WHERE waiting.status = 'suspended' AND session.inbox_end > session.taken
    ORDER BY waiting.priority DESC, waiting.since, waiting.sid LIMIT {{limit:d}}
"""
_HIGHEST = "SELECT priority FROM waiting WHERE status = 'active' {below} ORDER BY priority DESC, since, sid LIMIT 1"
# In the same words as the index for it, which is then used: an index by owner alone would read all rows of an owner.
_NEXT_OWNER = """
    SELECT owner FROM waiting WHERE status = 'active' AND priority = %s AND coalesce(owner, '') > %s
    ORDER BY coalesce(owner, '') LIMIT 1
"""
_LANE = f"""
    {_ROWS} FROM waiting JOIN session ON session.sid = waiting.sid
    WHERE waiting.status = 'active' AND waiting.priority = %s AND coalesce(waiting.owner, '') = %s
        AND session.inbox_end > session.taken AND session.claim IS NULL
    ORDER BY waiting.since, waiting.sid LIMIT {{limit:d}}
"""
_MOST = 1_000_000
# A client that has posted but not committed holds the row's lock. This waits for it, and reads the row as it is then.
_LAST_LOOK = "SELECT inbox_end > taken FROM session WHERE id = %s FOR SHARE"
_AT = f"WITH at AS MATERIALIZED (SELECT round(coalesce(%(at)s::float8, {NOW}) * 1000000)::bigint AS now)"
# `latest` is how far from now a place may be. If it would be beyond that, no row comes back.
_RESERVE = f"""
    {_AT}
    INSERT INTO rate (name, until) SELECT %(name)s, now + %(cost)s::bigint FROM at
        WHERE %(latest)s::bigint IS NULL OR %(cost)s::bigint <= %(latest)s::bigint
    ON CONFLICT (name) DO UPDATE SET until = greatest(rate.until, excluded.until - %(cost)s::bigint) + %(cost)s::bigint
        WHERE %(latest)s::bigint IS NULL OR rate.until <= excluded.until - %(cost)s::bigint
            OR rate.until + %(cost)s::bigint <= excluded.until - %(cost)s::bigint + %(latest)s::bigint
    RETURNING until, (SELECT now FROM at)
"""
_TAKEN = f"""
    {_AT}
    SELECT greatest(now, coalesce((SELECT until FROM rate WHERE name = %(name)s), 0)) + %(cost)s::bigint, now FROM at
"""


async def waiting(link: Link, limit: int, idle_only: bool) -> list[Waiting]:
    """Do what the job of this name does."""
    free = await link.rows(page(limit, idle_only=idle_only))
    claimed = await link.rows(_CLAIMED, {"at": given_time()}) if idle_only else []
    seen = {row[0] for row in free}  # a session that was given back between the two is in both
    look = Look()
    lapsed = [
        row[:-2]
        for row in claimed
        if row[0] not in seen and (row[-1] or look.finds_gone(holder_of(row[0], bytes(row[-2]))))
    ]
    return [waiting_of(_with_text(row)) for row in merged(free, lapsed)[:limit]]


async def held(link: Link, limit: int) -> list[Waiting]:
    """Do what the job of this name does."""
    rows = await link.rows(_HELD.format(limit=min(limit, _MOST)))
    return [waiting_of(_with_text(row)) for row in rows]


async def in_turn(link: Link, limit: int, after: str, skip: Collection[str], not_of: Collection[str]) -> list[Waiting]:
    """Do what the job of this name does."""
    turns = InTurnHere(plain(after), skip, {plain(owner) for owner in not_of})
    found = await link.read(lambda connection: ask(connection, turns.found(limit)))
    return [each if each.owner is None else replace(each, owner=restored(each.owner)) for each in found]


class InTurnHere(InTurn):
    """The same turns, read from `waiting`: its columns have indexes that those of `session` must not have."""

    def highest(self, below: int | None) -> tuple[str, Any]:
        if below is None:
            return _HIGHEST.format(below=""), ()
        return _HIGHEST.format(below="AND priority < %s"), (below,)

    def next_owner(self, priority: int, after: str) -> tuple[str, Any]:
        return _NEXT_OWNER, (priority, after)

    def lane(self, priority: int, owner: str | None, limit: int) -> tuple[str, Any]:
        return _LANE.format(limit=min(limit, _MOST)), (priority, owner or "")


def page(limit: int, *, idle_only: bool) -> str:
    return _FREE.format(idle="AND session.claim IS NULL" if idle_only else "", limit=min(limit, _MOST))


def _with_text(row: Any) -> Any:
    session_id, owner, *rest = row
    return session_id, None if owner is None else restored(owner), *rest


async def has_waiting(link: Link, session_id: str) -> bool:
    """Do what the job of this name does."""
    rows = await link.rows(_LAST_LOOK, (str(session_id),))
    if not rows:
        raise SessionNotFound(session_id)
    return bool(rows[0][0])


async def reserve(link: Link, name: str, cost: float, burst: float, most: float | None) -> float:
    """Do what the job of this name does."""
    asked = {"at": given_time(), "name": plain(name), "cost": micros(cost)}
    latest = None if most is None else micros(most) + micros(burst)
    rows = await link.rows(_RESERVE, {**asked, "latest": latest}) or await link.rows(_TAKEN, asked)
    ((until, now),) = rows
    return wait_of(until, now, burst)
