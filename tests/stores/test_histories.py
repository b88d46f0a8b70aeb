"""Histories of concurrent clients are linearizable on every store that perdure ships."""

from __future__ import annotations

from pathlib import Path

from tests import postgres_server

from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import HistoryContract


class TestMemoryStoreHistories(HistoryContract):
    name = "memory"

    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()


class TestSqliteStoreHistories(HistoryContract):
    name = "SQLite"
    shared = True

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")


class TestFileStoreHistories(HistoryContract):
    name = "files"
    shared = True

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")


class TestPostgresStoreHistories(HistoryContract):
    name = "PostgreSQL"
    shared = True

    def setup_method(self) -> None:
        postgres_server.dsn()  # starts the server, so that the processes inherit its address

    def open_store(self, where: Path) -> PostgresStore:
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.schema_of(where))
