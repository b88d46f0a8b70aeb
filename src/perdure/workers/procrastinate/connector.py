"""The connector that gives procrastinate perdure's own connections to the database."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from procrastinate.connector import BaseAsyncConnector, Notify
from psycopg.rows import dict_row

from perdure.workers.procrastinate.database import Connection, Database

# The notification of procrastinate's own trigger. Its worker fetches any job then, so the number does not matter.
_A_JOB = '{"type": "job_inserted", "job_id": 0}'


class DatabaseConnector(BaseAsyncConnector):
    """A connector that carries out procrastinate's statements, and repeats them if the server was lost meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Have procrastinate look for a job."""
        self._news.set()

    async def listen_notify(self, on_notification: Notify, channels: Iterable[str]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()  # first, so that news which come during the call are not lost
            await on_notification(channel="perdure", payload=_A_JOB)

    async def execute_query_async(self, query: str, **arguments: Any) -> None:
        await self.execute_query_all_async(query, **arguments)

    async def execute_query_one_async(self, query: str, **arguments: Any) -> dict[str, Any]:
        return (await self.execute_query_all_async(query, **arguments))[0]

    async def execute_query_all_async(self, query: str, **arguments: Any) -> list[dict[str, Any]]:
        async def work(connection: Connection) -> list[dict[str, Any]]:
            async with connection.cursor(row_factory=dict_row) as cursor:
                await cursor.execute(query.encode(), arguments)
                return await cursor.fetchall() if cursor.description else []

        return await self._database.read(work)
