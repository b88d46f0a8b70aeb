"""Every store that perdure ships keeps the contracts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import postgres_server

from perdure.stores.file import FileStore
from perdure.stores.memory import MemoryEngine, MemoryStore
from perdure.stores.postgres import PostgresStore
from perdure.stores.postgres.engine import PostgresEngine
from perdure.stores.sqlite import SqliteStore
from perdure.stores.sqlite.engine import SqliteEngine
from perdure.testing import (
    ArchiveContract,
    AttachmentsContract,
    BulkErasureContract,
    CheckContract,
    ChronicleContract,
    EngineContract,
    ErasureContract,
    FindContract,
    ForgetContract,
    HeadsContract,
    JournalContract,
    NamesContract,
    PreviewsContract,
    QueueContract,
    RetentionContract,
    SaveAllContract,
    SearchContract,
    SketchContract,
    StoreContract,
    TokenContract,
    VersionsContract,
)


class EveryContract(
    StoreContract,
    JournalContract,
    SearchContract,
    ErasureContract,
    ForgetContract,
    RetentionContract,
    ArchiveContract,
    AttachmentsContract,
    BulkErasureContract,
    CheckContract,
    ChronicleContract,
    NamesContract,
    PreviewsContract,
    FindContract,
    HeadsContract,
    SaveAllContract,
    SketchContract,
    QueueContract,
    TokenContract,
    VersionsContract,
):
    """The contracts that all stores keep. A file's rows are what its lines say: that engine is not tried by itself."""


class TestMemoryStore(EngineContract):
    """Sessions in memory, and the tables there that they are kept in."""

    def open_engine(self, where: Path) -> MemoryEngine:
        return MemoryEngine()

    def open_store(self, where: Path) -> MemoryStore:
        return MemoryStore()


class TestSqliteStore(EngineContract):
    """Sessions in one SQLite file, and the tables there that they are kept in."""

    shared = True

    def open_engine(self, where: Path) -> SqliteEngine:
        return SqliteEngine(where / "tables.db", 10.0)

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db")


@pytest.mark.sample(16)
class TestSqliteStoreInLoop(TestSqliteStore):
    """The same, with changes committed in the event loop's own thread."""

    def open_engine(self, where: Path) -> SqliteEngine:
        return SqliteEngine(where / "tables.db", 10.0, commit_in_loop=True)

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db", commit_in_loop=True)


@pytest.mark.sample(6)
class TestFileStore(EveryContract):
    """Sessions in a directory of files."""

    shared = True

    def open_store(self, where: Path) -> FileStore:
        return FileStore(where / "sessions")


class OnPostgres:
    """A real PostgreSQL, each test's sessions in a schema of its own."""

    shared = True

    def setup_method(self) -> None:
        postgres_server.dsn()  # so that it runs, and the processes of a race inherit its address

    @pytest.fixture(autouse=True)
    def _gives_back(self, tmp_path: Path) -> Iterator[None]:
        yield
        postgres_server.give_back(tmp_path)


@pytest.mark.sample(5)
class TestPostgresStore(OnPostgres, EngineContract):
    """Sessions in PostgreSQL, and the tables there that they are kept in."""

    def open_engine(self, where: Path) -> PostgresEngine:
        return PostgresEngine(postgres_server.dsn(), postgres_server.lent_schema(where), 8)

    def open_store(self, where: Path) -> PostgresStore:
        return PostgresStore(postgres_server.dsn(), schema=postgres_server.lent_schema(where))
