"""Every store that perdure ships keeps the contracts."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryStore
from perdure.stores.sqlite import SqliteStore
from perdure.testing import JournalContract, StoreContract


class TestMemoryStore(StoreContract, JournalContract):
    """Sessions in memory."""

    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()


class TestSqliteStore(StoreContract, JournalContract):
    """Sessions in one SQLite file."""

    shared = True

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")


class TestFileStore(StoreContract, JournalContract):
    """Sessions in a directory of files."""

    shared = True

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")
