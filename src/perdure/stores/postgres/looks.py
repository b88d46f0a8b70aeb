"""Checks of sessions' versions, with one statement for all that wait: a warm load is little more than such a check.

A single check is sent at once. Those requested while it is on its way are sent together after it. The result of a check
is never older than its request.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from perdure.stores.postgres.link import Link, fetched

_LOOK = """
    SELECT session.id, session.version, meta.erasures FROM session CROSS JOIN meta WHERE session.id = ANY (%s)
"""


class Seen(NamedTuple):
    """A session's version, and the store's count of erasures."""

    version: int
    erasures: int


class Looks:
    """A desk that answers looks, together where several wait."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._waiting: list[tuple[str, asyncio.Future[Seen | None]]] = []
        self._is_looking = False
        self._task: asyncio.Task[None] | None = None

    async def at(self, session_id: str) -> Seen | None:
        """Return a session's version and the count of erasures; None if the session does not exist."""
        if self._is_looking:
            done: asyncio.Future[Seen | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((session_id, done))
            return await done
        self._is_looking = True
        try:
            return (await self._look([session_id])).get(session_id)
        finally:
            self._go_on()

    def _go_on(self, _: object = None) -> None:
        """Look for the callers that came meanwhile, in a task that is not the first caller's."""
        self._is_looking = bool(self._waiting)
        if self._waiting:
            self._task = asyncio.get_running_loop().create_task(self._look_together(), name="perdure looks")
            self._task.add_done_callback(self._go_on)

    async def _look_together(self) -> None:
        asked, self._waiting = self._waiting, []
        try:
            seen = await self._look([*{session_id for session_id, _ in asked}])
        except BaseException as error:
            for _, done in asked:
                if not done.done():
                    # A cancellation of this task must not look like an error of the store.
                    done.set_exception(error) if isinstance(error, Exception) else done.cancel()
            if not isinstance(error, Exception):
                raise
        else:
            for session_id, done in asked:
                if not done.done():
                    done.set_result(seen.get(session_id))

    async def _look(self, session_ids: list[str]) -> dict[str, Seen]:
        async def attempt() -> dict[str, Seen]:
            async with self._link.looking.connection() as connection:
                rows = await fetched(connection, _LOOK, (session_ids,))
            return {session_id: Seen(version, erasures) for session_id, version, erasures in rows}

        return await self._link.patiently(attempt)

    async def close(self) -> None:
        """Wait for the looks under way."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})
