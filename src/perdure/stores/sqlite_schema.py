"""Opening a SQLite file the way every promise needs it, and bringing its schema up to date."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import apsw

from perdure.errors import ConfigurationError, StoreError

APPLICATION_ID = 0x70657264  # "perd"
_CHECKPOINT_PAGES = 4000
_BUSY_MS = 10_000


def prepare_file(path: Path) -> Path:
    """Create the file, readable by its owner alone, and return the path that is really meant."""
    if path.is_symlink():
        raise ConfigurationError(f"{path} is a symbolic link, which a store does not follow. Name the file itself.")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened for writing: {error.strerror}.") from None
    os.close(handle)
    return path.parent.resolve() / path.name


def connect(path: Path, *, reader: bool = False) -> apsw.Connection:
    """A connection with every setting read back: a pragma that is refused says nothing."""
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW
    connection = apsw.Connection(str(path), flags=flags)
    connection.set_busy_timeout(_BUSY_MS)
    _set(connection, "journal_mode", "wal")
    _set(connection, "synchronous", 2)
    _set(connection, "secure_delete", 1)
    _set(connection, "wal_autocheckpoint", _CHECKPOINT_PAGES)
    _set(connection, "trusted_schema", 0)
    _set(connection, "cell_size_check", 1)
    if reader:
        _set(connection, "query_only", 1)
    return connection


def _set(connection: apsw.Connection, pragma: str, value: str | int) -> None:
    connection.execute(f"PRAGMA {pragma} = {value}").fetchall()
    found = connection.execute(f"PRAGMA {pragma}").fetchall()
    if found != [(value,)]:
        raise StoreError(f"SQLite would not set {pragma} to {value} (it is {found}). This file system may not support it.")


def migrate(connection: apsw.Connection) -> None:
    """Apply the migrations that the file does not have yet, each once, whoever else is starting up."""
    with exclusively(connection):
        current = connection.pragma("user_version")
        known = connection.pragma("application_id")
        if known not in (0, APPLICATION_ID) or (known == 0 and _has_tables(connection)):
            raise StoreError("This is a SQLite file, but not one of perdure's. Name another file.")
        steps = list(_migrations())
        if current > len(steps):
            raise StoreError(f"This file has schema {current}; this release knows up to {len(steps)}. Upgrade perdure.")
        for number, script in enumerate(steps[current:], start=current + 1):
            connection.execute(script).fetchall()
            connection.pragma("user_version", number)
        if known == 0:
            connection.pragma("application_id", APPLICATION_ID)


def _has_tables(connection: apsw.Connection) -> bool:
    return bool(connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall())


@contextmanager
def exclusively(connection: apsw.Connection) -> Iterator[None]:
    """A transaction that writes, and nobody else does meanwhile."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _migrations() -> Iterator[str]:
    folder = files("perdure.stores") / "sql" / "sqlite"
    for script in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if script.name.endswith(".sql"):
            yield script.read_text()
