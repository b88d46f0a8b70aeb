"""A SQLite file copied page by page while others write, and put back.

The pages are those of one snapshot: a read transaction keeps SQLite from changing them. Pages that the write-ahead log
has are read from there, the others from the file itself. SQLite's own backup would begin again at each commit of
another process, and write the whole file each time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import apsw

from perdure.aio import aside
from perdure.errors import StoreError, StoreNotEmpty
from perdure.model.ids import new_id
from perdure.stores.copies import CHUNK, Outline, Part
from perdure.stores.engine import unfinished
from perdure.stores.file_lock import FileLock
from perdure.stores.folder import sync_directory
from perdure.stores.restore_lock import ELSEWHERE, RestoreLock, not_restored, require_directory
from perdure.stores.sqlite.schema import create_file, first_row, lock_path, meta, prepare_directory, search_path
from perdure.stores.sqlite.wal import Snapshot, snapshot_of_log

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit
    from perdure.stores.sqlite.engine import SqliteEngine

ENGINE = "sqlite"
_PART = "main"
_READ_AT_ONCE = 8 * CHUNK
COUNTED = ("session", "head", "msg", "blob")


def copy_out(path: Path, lock_timeout: float, deposit: Deposit, db: apsw.Connection) -> Outline:
    """Put the file into a deposit. `db` is for reading, and must not be in a transaction."""
    with _raw(path) as file, _pinned(path, lock_timeout, _place(deposit), db) as (log, size):
        page_size = db.pragma("page_size")
        outline = Outline(
            engine=ENGINE,
            store=str(meta(db, "uid")),
            schema=db.pragma("user_version"),
            counts={table: first_row(db, f"SELECT count(*) FROM {table}")[0] for table in COUNTED},
            facts={"page_size": page_size, "pages": size // page_size, "log": log.place},
        )
        deposit.expect(size)
        known = _unchanged(deposit, outline, log)
        for start in range(0, size, _READ_AT_ONCE):
            block = range(start, min(start + _READ_AT_ONCE, size), CHUNK)
            if all(at // CHUNK in known for at in block):
                for at in block:
                    deposit.put_known(_PART, known[at // CHUNK])
                continue
            raw = _read(file, log, page_size, start, min(_READ_AT_ONCE, size - start))
            for at in range(0, len(raw), CHUNK):
                deposit.put(_PART, raw[at : at + CHUNK])
    return outline


@contextmanager
def _pinned(
    path: Path, lock_timeout: float, since: list[int] | None, db: apsw.Connection
) -> Iterator[tuple[Snapshot, int]]:
    """Pin the state of the file that is committed now, and yield its log and its size.

    Every writer takes the lock. So what the log has while the lock is held is what the transaction sees.
    """
    lock = FileLock(lock_path(path), lock_timeout)
    try:
        with lock:
            first_row(db, "SELECT 1 FROM meta")  # makes the connection look at the log, before it is asked about it
            frames, moved = db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)
            db.execute("BEGIN")
            first_row(db, "SELECT 1 FROM meta")
            page_size = db.pragma("page_size")
            log = snapshot_of_log(path, page_size, max(frames, 0), since, is_moved=frames == moved)
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
    finally:
        lock.close()
    try:
        yield log, db.pragma("page_count") * page_size
    finally:
        log.close()
        db.execute("ROLLBACK")


@contextmanager
def _raw(path: Path) -> Iterator[apsw.VFSFile]:
    """Open the file itself, through SQLite. Closing it in any other way would drop the locks of all connections."""
    name = f"perdure {new_id()}"
    opened: dict[str, apsw.VFSFile] = {}

    class Vfs(apsw.VFS):
        def __init__(self) -> None:
            super().__init__(name, "")

        def xOpen(self, name: Any, flags: list[int]) -> apsw.VFSFile:
            file = apsw.VFSFile("", name, flags)
            opened.setdefault(name.filename() if isinstance(name, apsw.URIFilename) else str(name), file)
            return file

    vfs = Vfs()
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW, vfs=name)
    try:
        yield next(iter(opened.values()))
    finally:
        opened.clear()
        connection.close()
        vfs.unregister()


def _read(file: apsw.VFSFile, log: Snapshot, page_size: int, start: int, size: int) -> bytes:
    there = max(min(size, file.xFileSize() - start), 0)
    raw = file.xRead(there, start) if there else b""
    first = start // page_size
    pages = [number for number in range(first + 1, first + size // page_size + 1) if number in log.pages]
    if not pages:
        return raw
    # Pages beyond the end of the file are in the log.
    patched = bytearray(raw.ljust(size, b"\0"))
    for number in pages:
        at = (number - 1) * page_size - start
        patched[at : at + page_size] = log.read(number)
    return bytes(patched)


def _place(deposit: Deposit) -> list[int] | None:
    """Return the place where the write-ahead log ended at the last copy."""
    return None if deposit.last is None or deposit.last.engine != ENGINE else deposit.last.facts.get("log")


def _unchanged(deposit: Deposit, outline: Outline, log: Snapshot) -> Mapping[int, bytes]:
    """Return the chunks that have not changed since the last copy, as the log proves; none if it was restarted.

    All writes go through the log. If it is still the log of the last copy, the pages that it has named since then are
    all that have changed.
    """
    last = deposit.last
    if last is None or last.engine != ENGINE or last.facts.get("page_size") != outline.facts["page_size"]:
        return {}
    if log.changed is None:
        return {}
    per_chunk = CHUNK // outline.facts["page_size"]
    # The last chunk of a shorter file was not a whole one, unless by chance.
    whole = min(last.facts["pages"], outline.facts["pages"]) // per_chunk
    touched = {(page - 1) // per_chunk for page in log.changed}
    chunks = enumerate(deposit.chunks_of_last(_PART)[:whole])
    return {number: chunk for number, chunk in chunks if number not in touched}


class SqliteLanding:
    """A place to restore a SQLite file to. The file is written under another name, and renamed when it is whole."""

    def __init__(self, path: Path, lock_timeout: float, made: Callable[[Path], SqliteEngine]) -> None:
        self._path = path
        self._timeout = lock_timeout
        self._made = made
        self._lock: RestoreLock | None = None

    @property
    def engine(self) -> SqliteEngine:
        return self._made(self._beside)

    @property
    def _beside(self) -> Path:
        return unfinished(self._path)

    async def begin(self) -> None:
        await self._aside(self._begin)

    async def _aside(self, step: Callable[[], None]) -> None:
        try:
            await aside(step)
        except OSError as error:
            raise not_restored(self._path, error) from None

    def _begin(self) -> None:
        # A rename would replace a device or a pipe as it does a file.
        if os.path.lexists(self._path) and not (self._path.is_file() or self._path.is_symlink()):
            raise StoreError(f"{self._path} is not a regular file.", ELSEWHERE)
        require_directory(self._path.parent)
        self._path = prepare_directory(self._path)
        self._lock = RestoreLock(self._path)
        # Under the lock: what is beside it is then left from a killed restore, not of one that is running.
        self._remove(self._beside)
        self._require_empty()

    def _require_empty(self) -> None:
        if not self._path.exists():
            return
        try:
            create_file(self._path)  # StoreError if it is not perdure's
            self._require_no_sessions()
        except apsw.Error as error:
            raise StoreError(f"{self._path} cannot be read: {error}.", ELSEWHERE) from None
        if self._path.with_name(self._path.name + "-wal").exists():
            raise StoreError(f"{self._path} is in use by another process.", "End it first.")

    def _require_no_sessions(self) -> None:
        db = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_NOFOLLOW)
        try:
            db.set_busy_timeout(int(self._timeout * 1000))
            if first_row(db, "SELECT 1 FROM sqlite_schema WHERE name = 'session'"):
                (sessions,) = first_row(db, "SELECT count(*) FROM session")
                if sessions:
                    raise StoreNotEmpty(self._path, sessions)
        finally:
            db.close()

    async def take_in(self, outline: Outline, parts: Iterator[Part]) -> None:
        await self._aside(lambda: self._take_in(parts))

    def _take_in(self, parts: Iterator[Part]) -> None:
        handle = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "wb") as file:
            sync_directory(self._path.parent)  # after a power cut the store is unfinished, which opening it reports
            for part in parts:
                for chunk in part.chunks:
                    file.write(chunk)
            file.flush()
            os.fsync(file.fileno())

    async def publish(self) -> None:
        await self._aside(self._publish)

    def _publish(self) -> None:
        # Before the rename: the search index of the old file must never be found beside the new one.
        for each in (search_path(self._path), lock_path(self._beside), search_path(self._beside)):
            each.unlink(missing_ok=True)
        os.rename(self._beside, self._path)
        sync_directory(self._path.parent)

    async def end(self) -> None:
        if self._lock is not None:
            self._lock.give_back()

    def _remove(self, path: Path) -> None:
        for end in ("-wal", "-shm", "-lock", "-search", "-search-journal", ""):
            with suppress(FileNotFoundError):
                os.unlink(path.with_name(path.name + end))
