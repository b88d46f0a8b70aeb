"""What the planner knows about the sessions: it is brought up to date after many have come at once.

Without it the planner takes every filter of a list for a rare one, and sorts what an index has in order. The server
would see to it by itself within minutes, and not at all where autovacuum is off.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psycopg

from perdure.errors import StoreError
from perdure.stores.postgres.link import Link

_BETWEEN_LOOKS = 1_000
"""How many sessions are created until it is looked again."""
# A few pages are read quickly by any plan.
_OUTDATED = """
    SELECT 1 FROM pg_class
    WHERE oid IN ('session'::regclass, 'tag'::regclass)
        AND pg_relation_size(oid) / current_setting('block_size')::bigint > greatest(10, 2 * relpages)
"""
# Whoever has a table locked is at the same work.
_ANALYZE = "ANALYZE (SKIP_LOCKED) session, tag"


class Statistics:
    """Looks now and then whether the planner knows the tables as they are."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._task: asyncio.Task[None] | None = None
        self._created = 0

    def note(self) -> None:
        """Count a session that has been created. After many, look beside what is being done."""
        self._created += 1
        if self._created >= _BETWEEN_LOOKS and (self._task is None or self._task.done()):
            self._created = 0
            self._task = asyncio.get_running_loop().create_task(self._bring_up_to_date(), name="perdure statistics")

    async def _bring_up_to_date(self) -> None:
        with suppress(StoreError, psycopg.Error, OSError):  # lists are right without it, and the next look is to come
            if await self._link.rows(_OUTDATED):
                async with await self._link.connect() as connection:  # outside of the pool: it may take a second
                    await connection.execute(_ANALYZE, prepare=False)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
