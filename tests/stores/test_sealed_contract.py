"""A store with keys keeps the same contracts as one without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import postgres_server
from tests.stores.test_contract import EveryContract

from perdure.keys import FileKeyRing
from perdure.stores.postgres import PostgresStore
from perdure.stores.sqlite import SqliteStore

MASTER = b"a master key of 32 random bytes."


def ring_in(where: Path) -> FileKeyRing:
    return FileKeyRing(where / "keys.json", master=MASTER, create=True)


@pytest.mark.sample(4)
class TestSealedSqliteStore(EveryContract):
    """Sessions in one SQLite file, sealed."""

    shared = True

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db", keys=ring_in(where))


@pytest.mark.sample(6)
class TestSealedPostgresStore(EveryContract):
    """Sessions in a real PostgreSQL, sealed."""

    shared = True

    def setup_method(self) -> None:
        postgres_server.dsn()  # so that it runs, and the processes of a race inherit its address

    @pytest.fixture(autouse=True)
    def _gives_back(self, tmp_path: Path) -> Iterator[None]:
        yield
        postgres_server.give_back(tmp_path)

    def open_store(self, where: Path) -> PostgresStore:
        schema = postgres_server.lent_schema(where)
        return PostgresStore(postgres_server.dsn(), schema=schema, keys=ring_in(where))
