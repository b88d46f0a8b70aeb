"""A worker's own connection. It shows other workers that this one lives, and receives notifications of new jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

import psycopg
from procrastinate.manager import get_channel_for_queues
from procrastinate.sql import queries
from psycopg import sql

from perdure.workers.procrastinate.database import Connection, Database

_PAUSE = 0.2
LOCK_OF_WORKER = "hashtextextended(%(queue)s::text || '/' || {worker}, 0)"
"""The number of the lock that a worker holds while it lives. If the process is killed, the server frees it at once."""
_HOLD = f"SELECT pg_advisory_lock({LOCK_OF_WORKER.format(worker='%(worker)s::bigint')})"


class Presence:
    """The registration of a worker with procrastinate, and its lock. Use it with `async with`.

    If the connection is lost, other workers may take this one for dead until it is back. Then they look at its
    sessions, and find them claimed.
    """

    worker_id: int

    def __init__(self, database: Database, queue: str, tell: Callable[[], None]) -> None:
        self._database = database
        self._queue = queue
        self._tell = tell

    async def __aenter__(self) -> Self:
        connection = await self._database.patiently(self._register)
        self._task = asyncio.create_task(self._stay(connection), name="perdure presence")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _register(self) -> Connection:
        connection = await self._database.connect()
        try:
            # In one transaction, or a sweep could see the worker without its lock, and take it for dead.
            async with connection.transaction():
                row = await (await connection.execute(queries["register_worker"].encode())).fetchone()
                assert row is not None
                self.worker_id = row[0]
                await self._hold(connection)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _hold(self, connection: Connection) -> None:
        await connection.execute(_HOLD.encode(), {"queue": self._queue, "worker": self.worker_id})

    async def _stay(self, connection: Connection | None) -> None:
        while True:
            with suppress(psycopg.Error, OSError):  # the connection is lost: until it is back, jobs are polled for
                async with connection or await self._database.connect() as held:
                    if connection is None:
                        await self._hold(held)
                    await self._hear(held)
            connection = None
            await asyncio.sleep(_PAUSE)

    async def _hear(self, connection: Connection) -> None:
        for channel in get_channel_for_queues([self._queue]):
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(channel)))
        self._tell()  # for notifications that came before LISTEN
        async for _ in connection.notifies():
            self._tell()
