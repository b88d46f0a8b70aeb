"""Each dispatcher keeps the contract, on each store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

from perdure import FileStore, MemoryStore, PostgresStore, SqliteStore
from perdure.testing.dispatcher_contract import DispatcherContract
from perdure.workers import InboxDispatcher
from perdure.workers.procrastinate import ProcrastinateDispatcher

pytestmark = pytest.mark.sample(2)  # make torture runs all


class Inboxes(DispatcherContract):
    def dispatcher(self, store: Any) -> InboxDispatcher:
        return InboxDispatcher(store)


class TestInboxesInMemory(Inboxes):
    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()


class TestInboxesInFiles(Inboxes):
    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")


class TestInboxesInSqlite(Inboxes):
    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")


class TestInboxesInPostgres(Inboxes):
    def open_store(self, where: Path) -> PostgresStore:
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))


class TestProcrastinate(DispatcherContract):
    def open_store(self, where: Path) -> PostgresStore:
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))

    def dispatcher(self, store: Any) -> ProcrastinateDispatcher:
        return ProcrastinateDispatcher(store)
