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
