"""Opening a SQLite file the way every promise needs it, and bringing its schema up to date."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite
from pathlib import Path
from typing import Any

import apsw
import msgspec

from perdure.errors import ConfigurationError, CorruptRecord, RestoreUnfinished, SessionLocked, StoreError
from perdure.stores.engine import unfinished
from perdure.stores.file_lock import FileLock
from perdure.stores.folder import make_directory, sync_directory
from perdure.stores.format.heads import was_spawned
from perdure.stores.format.rows import Batch, batch_checksum, entry_checksum, key_checksum, log_checksum, minute_of
from perdure.stores.lock_holder import has_open
from perdure.stores.sqlite import steps

APPLICATION_ID = 0x70657264  # "perd"
# At most 64 MiB of write-ahead log. 64 tasks saved 3,370 and 4,410 times a second with it, 3,280 and 3,250 with 4,000.
CHECKPOINT_PAGES = 16_000
_LOST = (
    "Keep a copy of the file, and restore the store from a backup. "
    "If there is none, `sqlite3 FILE .recover` saves what it can."
)
# Writers wait for the lock beside the file first. So this is mostly for others, such as a `sqlite3` shell.
BUSY_MS = 10_000
# Instead of 2,000. Each commit of a writer empties this cache, and a long session is read once from end to end. Loads
# of 0 and of 10,000 messages took as long with either, and the process is 1.9 MB smaller.
_READER_CACHE_KB = 256
_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW
_WHOLE = Path(__file__).with_name("schema.sql")
"""The statements that a new file begins with: the outcome of all migrations, which would take three times as long."""


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


def search_path(path: Path) -> Path:
    """Return where the search index of a store is."""
    return path.with_name(path.name + "-search")


def prepare(given: Path, lock_timeout: float) -> Path:
    """Create the file if it is missing, bring its schema up to date, and return its resolved path."""
    path = prepare_directory(given)
    if unfinished(path).exists():
        raise RestoreUnfinished(path, unfinished(path))
    lock = FileLock(lock_path(path), lock_timeout)
    try:
        with lock:
            create_file(path)
            connection = connect(path)
            try:
                migrate(connection)
            finally:
                connection.close()
    except SessionLocked as locked:
        if not _is_in_use(path, locked.holder):
            raise
    except apsw.CorruptError as error:
        raise StoreError(f"{path} is damaged: SQLite cannot open it ({error}).", _LOST) from None
    except apsw.Error as error:
        raise StoreError(f"{path} cannot be opened as a SQLite database: {error}") from None
    except OSError as error:  # of the files beside it, or of perdure's own: the process may have no handle left
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from None
    finally:
        lock.close()
    return path


def _is_in_use(path: Path, holder: int | None) -> bool:
    """Tell whether the process that holds the lock has the file open, and the schema is up to date.

    The file can then be read, even if that process is stopped. Its log needs no check: only the first process that
    opens the file recovers from it.
    """
    if holder is None or not has_open(holder, path.with_name(path.name + "-shm")):
        return False
    try:
        connection = connect(path, reader=True)
        try:
            return _require_own(connection) == newest_schema()
        finally:
            connection.close()
    except apsw.Error:
        return False


def prepare_directory(path: Path) -> Path:
    """Create the directory of a file, for its owner alone, and return the file's resolved path."""
    try:
        if path.is_symlink():
            raise ConfigurationError(f"{path} is a symbolic link, which a store does not follow. Name the file itself.")
        make_directory(path.parent)
        return path.parent.resolve() / path.name
    except OSError as error:
        raise StoreError(f"{path.parent} cannot be created or entered: {error.strerror}.") from None


def create_file(path: Path) -> None:
    """Create the file, readable by its owner alone. If it exists, refuse one that is not perdure's.

    An existing file is opened only through SQLite. Closing it in any other way would drop the locks that SQLite holds
    on it for the whole process.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        sync_directory(path.parent)
    except FileExistsError:
        connection = apsw.Connection(str(path), flags=_FLAGS)
        try:
            connection.set_busy_timeout(BUSY_MS)
            # Otherwise closing it would empty the write-ahead log before that has been checked.
            connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            _require_own(connection)
            from perdure.stores.sqlite.wal import require_sound_log

            require_sound_log(connection, path)
        finally:
            connection.close()
    except OSError as error:
        raise StoreError(f"{path} cannot be created: {error.strerror}.") from None


def connect(path: Path, *, reader: bool = False) -> apsw.Connection:
    """Open a connection and read every setting back, since SQLite does not report a pragma that it refuses."""
    connection = apsw.Connection(str(path), flags=_FLAGS)
    if not reader and connection.readonly("main"):  # SQLite silently opens what it may not write for reading
        raise StoreError(f"{path} may be read, but not written. Check its permissions and the file system.")
    connection.set_busy_timeout(BUSY_MS)
    # Plans then do not depend on bound values. Otherwise SQLite often plans a statement again when it is reused.
    connection.config(apsw.SQLITE_DBCONFIG_ENABLE_QPSG, 1)
    _set(connection, "journal_mode", "wal")
    # FULL: a commit is on the disk when it returns. An acknowledged save and the mark beside the file rely on that.
    _set(connection, "synchronous", 2)
    # Erased text must not stay in freed space.
    _set(connection, "secure_delete", 1)
    _set(connection, "wal_autocheckpoint", CHECKPOINT_PAGES)
    # The schema of a tampered file must not call functions.
    _set(connection, "trusted_schema", 0)
    # Damage is found when a page is read, before it can spread to others.
    _set(connection, "cell_size_check", 1)
    if reader:
        _set(connection, "query_only", 1)
        _set(connection, "cache_size", -_READER_CACHE_KB)
    return connection


def connect_to_write(path: Path) -> apsw.Connection:
    """Open a connection for writing, and sync the directory, so that the write-ahead log keeps its name.

    SQLite syncs the directory too, but does not check whether that fails.
    """
    connection = connect(path)
    try:
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()  # this creates the log, if there is none
        _sync_for_good(path.parent)
    except BaseException:
        connection.close()
        raise
    return connection


class SyncFailed(StoreError):
    """The error for a failed sync, after which no later success can be trusted."""


def _sync_for_good(directory: Path) -> None:
    try:
        sync_directory(directory)
    except OSError as error:
        raise SyncFailed(
            f"{directory} could not be synced ({error.strerror}), and this store refuses more. "
            "Check the disk, then reopen the store."
        ) from None


def _set(connection: apsw.Connection, pragma: str, value: str | int) -> None:
    connection.execute(f"PRAGMA {pragma} = {value}").fetchall()
    found = connection.execute(f"PRAGMA {pragma}").fetchall()
    if found != [(value,)]:
        raise StoreError(
            f"SQLite would not set {pragma} to {value} (it is {found}). This file system may not support it."
        )


def migrate(connection: apsw.Connection) -> None:
    """Apply the migrations that the file lacks, each once, even if other processes start at the same time."""
    for name, function in _FUNCTIONS.items():
        connection.create_scalar_function(name, function, deterministic=True)
    scripts = _migrations()
    found = _require_own(connection)
    if 0 < found < len(scripts):  # of several, the first: the steps of the others need what it makes
        steps.take(connection, steps.halves(scripts[found].read_text())[0], lambda: exclusively(connection))
    with exclusively(connection):
        # Read again under the lock: another process may have migrated the file meanwhile.
        current = _require_own(connection)
        if current == 0:
            connection.execute(_WHOLE.read_text()).fetchall()
            current = len(scripts)
            connection.pragma("user_version", current)
        for number, script in list(enumerate(scripts, start=1))[current:]:
            in_steps, rest = steps.halves(script.read_text())
            steps.take(connection, in_steps, nullcontext)
            connection.execute(rest).fetchall()
            connection.pragma("user_version", number)
        connection.pragma("application_id", APPLICATION_ID)


def _require_own(connection: apsw.Connection) -> int:
    """Return the number of the file's schema. Raise StoreError if it is not perdure's, or a newer release's."""
    known, current = connection.pragma("application_id"), connection.pragma("user_version")
    has_tables = connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchall()
    if known not in (0, APPLICATION_ID) or (known == 0 and has_tables):
        take_in = "What another library has stored is taken in by `perdure import --from …`."
        raise StoreError("This is a SQLite file, but not one of perdure's.", f"Name another file. {take_in}")
    newest = newest_schema()
    if current > newest:
        raise StoreError(f"This file has schema {current}; this release knows up to {newest}. Upgrade perdure.")
    return int(current)


@contextmanager
def exclusively(connection: apsw.Connection) -> Iterator[None]:
    """Run the block in a transaction that holds the write lock."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        if connection.in_transaction:  # a full disk or an I/O error may have ended it
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def first_row(db: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> Any:
    """Return the first row, or None."""
    return db.execute(sql, bindings).fetchone()


def rows_of(db: apsw.Connection, sql: str, bindings: tuple[Any, ...] = ()) -> list[Any]:
    return db.execute(sql, bindings).fetchall()


def meta(db: apsw.Connection, key: str) -> Any:
    """Return a value of the file's `meta` table. Raise CorruptRecord if it is missing."""
    found = first_row(db, "SELECT value FROM meta WHERE key = ?", (key,))
    if found is None:
        raise CorruptRecord(None, f"meta {key}", "it is missing")
    return found[0]


def newest_schema() -> int:
    """Return the number of the schema that this release writes."""
    return len(_migrations())


def _migrations() -> list[Path]:
    return sorted((Path(__file__).parent / "migrations").glob("*.sql"))


def _batch_body(kind: bytes, body: bytes) -> bytes:
    return b"[[%s,%s]]" % (msgspec.json.encode(kind.decode(errors="replace")), body)


def _batch_crc(sid: int, seq: int, loop: bytes | None, kind: bytes, crc: int, body: bytes) -> int:
    """Return the checksum of an old row in its new form. If the old one was wrong, so is the new one.

    Texts come as bytes. A damaged one may not be UTF-8, and must not keep the others from being read.
    """
    run = None if loop is None else loop.decode(errors="replace")
    batch = Batch(1, run, {}, _batch_body(kind, body))
    was_sound = entry_checksum(sid, seq, run, kind.decode(errors="replace"), body) == crc
    return batch_checksum(sid, seq, batch) ^ (0 if was_sound else 1)


def _minute(time: float) -> int:
    return minute_of(time) if isfinite(time) else 0


# The SQL functions that migrations call.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "batch_body": _batch_body,
    "batch_crc": _batch_crc,
    "key_crc": key_checksum,
    "log_crc": log_checksum,
    "minute": _minute,
    "was_spawned": was_spawned,
}
