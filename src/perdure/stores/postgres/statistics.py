"""The planner's statistics of the sessions, brought up to date after many were created at once.

Without them the planner takes every filter of a list for a rare one, and sorts rows that an index has in order. The
server updates them by itself within minutes, but never if autovacuum is off.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import psycopg

from perdure.errors import StoreError
from perdure.stores.postgres.link import Link

_BETWEEN_LOOKS = 1_000
"""The number of sessions created between two looks."""
# Twice as large as the planner knows. A table of ten pages is read quickly by any plan.
_OUTDATED = """
    SELECT 1 FROM pg_class
    WHERE oid IN ('session'::regclass, 'tag'::regclass)
        AND pg_relation_size(oid) / current_setting('block_size')::bigint > greatest(10, 2 * relpages)
"""
# A process that has a table locked here is doing the same work.
_ANALYZE = "ANALYZE (SKIP_LOCKED) session, tag"


class Statistics:
    """A guard that checks now and then whether the planner's statistics still describe the tables."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._task: asyncio.Task[None] | None = None
        self._created = 0

    def note(self) -> None:
        """Count a session that was created. After many, check the statistics in a task of its own."""
        self._created += 1
        if self._created >= _BETWEEN_LOOKS and (self._task is None or self._task.done()):
            self._created = 0
            self._task = asyncio.get_running_loop().create_task(self._bring_up_to_date(), name="perdure statistics")

    async def _bring_up_to_date(self) -> None:
        with suppress(StoreError, psycopg.Error, OSError):  # lists are correct without it, and another check follows
            if await self._link.rows(_OUTDATED):
                async with await self._link.connect() as connection:  # outside of the pool: it may take a second
                    await connection.execute(_ANALYZE, prepare=False)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
