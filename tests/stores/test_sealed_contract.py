"""A store with keys keeps the same contracts as one without."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests import postgres_server
from tests.stores.sealed_scene import ring_in
from tests.stores.test_contract import EveryContract, OnPostgres

from perdure.stores.postgres import PostgresStore
from perdure.stores.sqlite import SqliteStore


@pytest.mark.sample(6)
class TestSealedSqliteStore(EveryContract):
    """Sessions in one SQLite file, sealed."""

    shared = True

    def open_store(self, where: Path) -> SqliteStore:
        return SqliteStore(where / "sessions.db", keys=ring_in(where))


@pytest.mark.sample(8)
class TestSealedPostgresStore(OnPostgres, EveryContract):
    """Sessions in PostgreSQL, sealed."""

    def open_store(self, where: Path) -> PostgresStore:
        schema = postgres_server.lent_schema(where)
        return PostgresStore(postgres_server.dsn(), schema=schema, keys=ring_in(where))
