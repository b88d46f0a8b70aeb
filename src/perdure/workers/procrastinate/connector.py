"""procrastinate's way to the database: by perdure's own connections."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from procrastinate.connector import BaseAsyncConnector, Notify
from psycopg.rows import dict_row

from perdure.workers.procrastinate.database import Connection, Database

_A_JOB = '{"type": "job_inserted", "job_id": 0}'


class DatabaseConnector(BaseAsyncConnector):
    """Carries out procrastinate's statements, and again if the server was lost meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._news = asyncio.Event()

    def tell(self) -> None:
        """Have procrastinate look for a job."""
        self._news.set()

    async def listen_notify(self, on_notification: Notify, channels: Iterable[str]) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
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
