"""Opening a SQLite file whose log has lost commits, after a person has accepted the loss."""

from __future__ import annotations

import os
import shutil
from itertools import count
from pathlib import Path

import apsw

from perdure.errors import CorruptRecord, SessionLocked, StoreError
from perdure.stores.file_lock import LOCK_TIMEOUT, FileLock
from perdure.stores.folder import sync_directory
from perdure.stores.sqlite.marks import log_path, mark_path
from perdure.stores.sqlite.schema import lock_path
from perdure.stores.sqlite.wal import require_sound_log

_FLAGS = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW


def accept_lost_commits(path: str | os.PathLike[str], *, lock_timeout: float = LOCK_TIMEOUT) -> Path | None:
    """Give up the commits that the log of a SQLite file has lost, so that the file can be opened again.

    What SQLite can still read is kept. The log is copied first. Return the path of the copy, or None if nothing is
    lost or the log is empty. If another process has the file open, raise StoreError and change nothing.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise StoreError(f"{file} is not there. Name the file of a store.")
    lock = FileLock(lock_path(file), lock_timeout)
    try:
        with lock:
            return _accept(file)
    except SessionLocked:
        raise _in_use(file) from None
    except (apsw.Error, OSError) as error:
        raise StoreError(f"{file} could not be repaired: {error}.") from None
    finally:
        lock.close()


def _accept(file: Path) -> Path | None:
    db = apsw.Connection(str(file), flags=_FLAGS)
    try:
        # Otherwise closing it would empty the log before that has been copied.
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.pragma("application_id")
        try:
            require_sound_log(db, file)
            return None
        except CorruptRecord:  # the loss that the caller accepts
            pass
        _require_alone(db, file)
        kept = _copied(log_path(file))
        db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
    finally:
        db.close()
    # Last: if this is killed before, the mark is still there, and the command can be repeated.
    mark_path(file).unlink(missing_ok=True)
    sync_directory(file.parent)
    return kept


def _require_alone(db: apsw.Connection, file: Path) -> None:
    try:
        # In this mode SQLite takes all locks on the file, which fails while any other connection has it open.
        db.pragma("locking_mode", "exclusive")
        db.execute("BEGIN EXCLUSIVE; ROLLBACK")
        # SQLite gives the locks back with the next access, which is the SELECT.
        db.pragma("locking_mode", "normal")
        db.execute("SELECT 1 FROM sqlite_schema").fetchall()
    except apsw.BusyError:
        raise _in_use(file) from None


def _in_use(file: Path) -> StoreError:
    return StoreError(f"Another process uses {file}. Nothing was changed. Stop it first, and try again.")


def _copied(log: Path) -> Path | None:
    """Copy the log beside itself, unless it is empty, and return the path. Only its owner may read it, like the log."""
    if not log.exists() or not log.stat().st_size:
        return None
    kept = next(path for number in count(1) if not (path := log.with_name(f"{log.name}-lost-{number}")).exists())
    with log.open("rb") as source, os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as copy:
        shutil.copyfileobj(source, copy)
        copy.flush()
        os.fsync(copy.fileno())
    return kept
