"""The engines keep the contract for engines."""

from __future__ import annotations

from pathlib import Path

from perdure.stores.memory import MemoryEngine
from perdure.stores.sqlite.engine import SqliteEngine
from perdure.testing import EngineContract


class TestMemoryEngine(EngineContract):
    """The tables in memory, and every verb of a store over them."""

    def open_engine(self, where: Path) -> MemoryEngine:
        return MemoryEngine()


class TestSqliteEngine(EngineContract):
    """The tables in a SQLite file, and every verb of a store over them."""

    shared = True

    def open_engine(self, where: Path) -> SqliteEngine:
        return SqliteEngine(where / "sessions.db", 10.0)
