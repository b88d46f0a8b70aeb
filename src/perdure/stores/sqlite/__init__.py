"""Sessions in one SQLite file, which any number of processes may share."""

from __future__ import annotations

import os
from pathlib import Path

from perdure.errors import InvalidData
from perdure.model.checks import expect, expect_count, expect_wait
from perdure.protocols import KeyRing
from perdure.stores import checked
from perdure.stores.file_lock import LOCK_TIMEOUT
from perdure.stores.sqlite.engine import SqliteEngine
from perdure.stores.store import IndexedStore


class SqliteStore(IndexedStore):
    """A store in one SQLite file. Saves survive a power cut, and saves that wait together share one fsync.

    `cache` is how many sessions are kept in memory; a cached session is checked against the file at every load.
    `lock_timeout` is how many seconds a writer waits for another process before it raises SessionLocked.
    With `commit_in_loop` a save is committed in the event loop's own thread while no other process is writing. That
    takes less time, but the loop waits for the disk: use it in a script or a command, not in a server.
    With `keys`, what is written is sealed, as the page Encryption at rest explains.
    """

    _engine: SqliteEngine

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        cache: int = 128,
        lock_timeout: float = LOCK_TIMEOUT,
        commit_in_loop: bool = False,
        keys: KeyRing | None = None,
    ) -> None:
        if not isinstance(path, str | os.PathLike) or str(path) in ("", ":memory:"):
            raise InvalidData("$.path", "a SqliteStore is a file; use MemoryStore() to keep sessions in memory")
        engine = SqliteEngine(
            Path(path),
            expect_wait(lock_timeout, "$.lock_timeout"),
            commit_in_loop=expect(commit_in_loop, bool, "$.commit_in_loop"),
        )
        super().__init__(engine, cache=expect_count(cache, "$.cache"), keys=checked.keys(keys))

    @property
    def is_open(self) -> bool:
        return self._engine.is_open
