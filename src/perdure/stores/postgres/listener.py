"""Notifications that a record has grown. The record is the truth: a caller that misses one only hears later."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import psycopg
from psycopg import sql

from perdure.stores.postgres.link import Connection, Link

_LISTENED_FOR = 60.0
_PAUSE = 0.2
_PATIENCE = 1.0
# Writers notify only while there is a listener: a notification takes a lock that all commits would queue for.
_FOLLOW = (
    "UPDATE meta SET followed = extract(epoch FROM clock_timestamp()) + %s"
    " WHERE followed < extract(epoch FROM clock_timestamp()) + %s"
)


class Listener:
    """One connection that listens, opened when a caller first waits for news, and again when it is lost."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._task: asyncio.Task[None] | None = None
        self._listening = asyncio.Event()
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._followed_at = float("-inf")

    async def changed(self, session_id: str, after: int, most: float) -> None:
        """Return once a session's record goes beyond entry `after`, or after `most` seconds in any case."""
        self._link.check()
        news = asyncio.Event()
        self._waiting.setdefault(session_id, set()).add(news)
        try:
            async with asyncio.timeout(most):
                await self._start()
                # Asked once the connection listens: what was written before is seen here, what comes later is heard.
                # Asked again after each: news of something older may arrive late.
                while await self._ends_by(session_id, after):
                    await news.wait()
                    news.clear()
        except TimeoutError:
            pass
        finally:
            self._forget(session_id, news)

    async def _ends_by(self, session_id: str, after: int) -> bool:
        row = await self._link.row("SELECT evt_end FROM session WHERE id = %s", (session_id,))
        return row is not None and bool(row[0] <= after)

    @asynccontextmanager
    async def listening(self, session_id: str) -> AsyncIterator[Callable[[float], Awaitable[None]]]:
        """Listen to a session within the block. What is written between two waits is not missed."""
        self._link.check()
        news = asyncio.Event()
        self._waiting.setdefault(session_id, set()).add(news)

        async def heard(most: float) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(most):
                    await self._start()
                    await news.wait()
            news.clear()

        try:
            with suppress(TimeoutError):  # begun before the first wait, so that nothing written from now on is missed
                async with asyncio.timeout(_PATIENCE):
                    await self._start()
            yield heard
        finally:
            self._forget(session_id, news)

    def _forget(self, session_id: str, news: asyncio.Event) -> None:
        self._waiting[session_id].discard(news)
        if not self._waiting[session_id]:
            del self._waiting[session_id]

    async def _start(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._listen(), name="perdure listener")
        await self._listening.wait()
        clock = asyncio.get_running_loop().time()
        # Renewed well before it ends, so that writers never stop notifying in between.
        if clock > self._followed_at + _LISTENED_FOR / 4:
            await self._link.rows(f"{_FOLLOW} RETURNING 1", (_LISTENED_FOR, _LISTENED_FOR * 3 / 4))
            self._followed_at = clock

    async def _listen(self) -> None:
        while not self._link.closed:
            with suppress(psycopg.Error, OSError):  # it is lost; its callers look again after their timeout
                async with await self._link.connect() as connection:
                    await self._hear(connection)
            self._listening.clear()
            await asyncio.sleep(_PAUSE)

    async def _hear(self, connection: Connection) -> None:
        await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._link.channel)))
        self._listening.set()
        self._tell_all()
        async for notification in connection.notifies():
            for news in self._waiting.get(notification.payload, ()):
                news.set()

    def _tell_all(self) -> None:
        """Wake all callers, since something may have been missed while no connection listened."""
        for waiting in self._waiting.values():
            for news in waiting:
                news.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
