"""The stores of the crash tests, by an address that can be passed to another process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests import postgres_server

import perdure

KINDS = ("sqlite", "postgres")
NAMES = {"sqlite": "SQLite", "files": "files", "file": "files", "postgres": "PostgreSQL"}
"""The stores' names in the table of outcomes."""
_FILES = "file:"


def address_of(kind: str, where: Path, dsn: str | None = None) -> str:
    """Return the address of a test's sessions in a store of that kind, on a server of its own if it names one."""
    if kind == "sqlite":
        return str(where / "sessions.db")
    if kind == "files":
        return f"{_FILES}{where / 'sessions'}"
    return f"{postgres_server.schema_of(where)}@{dsn or postgres_server.dsn()}"


def store_at(address: str) -> Any:
    """Return the store with that address, not yet opened."""
    schema, at, dsn = address.partition("@")
    if at and "://" in dsn:
        return perdure.PostgresStore(dsn, schema=schema)
    if address.startswith(_FILES):
        return perdure.FileStore(address.removeprefix(_FILES))
    return perdure.SqliteStore(address)


def wait_for_server(address: str, application: str) -> None:
    """Wait until a server has handled all that a killed process had sent: its last statement may still end."""
    dsn = address.partition("@")[2]
    if "://" not in dsn:
        return
    import psycopg

    asked = "SELECT count(*) FROM pg_stat_activity WHERE application_name = %s"
    with psycopg.connect(dsn, autocommit=True) as connection:
        while connection.execute(asked, (application[:63],)).fetchone() != (0,):
            time.sleep(0.005)
