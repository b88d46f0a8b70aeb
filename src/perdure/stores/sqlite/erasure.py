"""Erasing from a SQLite file for good: the messages that go are noted for the search index, and pages are scrubbed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apsw

from perdure.errors import StoreError
from perdure.stores.engine import Delete, Job, Lock, Select, Statement, T, Update, Where, drive
from perdure.stores.format.rows import checksum
from perdure.stores.sqlite.engine import TRANSLATOR, Rows
from perdure.stores.sqlite.schema import connect, exclusively, first_row, meta
from perdure.stores.sqlite.scrub import scrub
from perdure.stores.sqlite.search import UNKNOWN, Changed, Erased
from perdure.stores.sqlite.wal import pages_in_log
from perdure.stores.sqlite.worker import require_in_place

# The tables whose rows move when sessions are saved, so that names may be left in pages that no erasure touches.
# All others are appended to, and their rows move in erasures only.
_NAMES = frozenset({"session", "tag", "log", "run", "key"})


class Erasure:
    """One job that erases, carried out alone in the writer's thread, and what has to be done after it."""

    def __init__(self, path: Path, *, indexed: bool) -> None:
        self._path = path
        self._indexed = indexed
        self.erased = Erased(UNKNOWN, UNKNOWN, 0, ())

    @property
    def has_erased(self) -> bool:
        return self.erased.after != self._before

    def carry_out(self, job: Callable[[], Job[T]], at: float, db: apsw.Connection) -> T:
        """Drive the job in a transaction of its own, and note which pages it touches."""
        require_in_place(db)
        noting = _NotingRows(db, at)
        with exclusively(db):
            self._before = int(meta(db, "erasures"))
            done = drive(job(), noting.answer if self._indexed else noting.answer_unindexed)
            (newest,) = first_row(db, "SELECT coalesce(max(rowid), 0) FROM msg")
            after = int(meta(db, "erasures"))
        # Before the lock is let go: the next to write may begin the log again.
        touched = pages_in_log(self._path, db.pragma("page_size")) if noting.is_of_sessions else None
        # Where no index has its messages, they were not read.
        before = self._before if self._indexed else UNKNOWN
        self.erased = Erased(before, after, newest, noting.changed, touched)
        return done

    def scrub(self, start: int, _: apsw.Connection) -> int | None:
        """Overwrite what has been deleted, where it stood; return where to continue, None at the end.

        The first time counts as an erasure: what is indexed before it may be what is being erased.
        """
        connection = connect(self._path)  # see `sqlite.scrub`, which needs its own
        is_first, touched = start == 1, self.erased.touched
        try:
            checkpoint(connection)
            with exclusively(connection):
                tables = None if touched is None else _NAMES
                more = scrub(
                    connection, self._path, touched=touched or () if is_first else (), tables=tables, start=start
                )
                connection.execute("UPDATE meta SET value = value + ? WHERE key = 'erasures'", (int(is_first),))
            checkpoint(connection)
            if is_first:
                self.erased = self.erased.counted_up_to(int(meta(connection, "erasures")))
            return more
        finally:
            connection.close()


class _NotingRows(Rows):
    """Rows that note which messages are deleted or replaced."""

    def __init__(self, db: apsw.Connection, at: float) -> None:
        super().__init__(db, at)
        self.changed: list[Changed] = []
        self.is_of_sessions = False
        """Whether sessions were named. If none is, everything that is left of any has to go."""

    def answer(self, statement: Statement) -> list[Any]:
        match statement:
            case Delete("msg", where):
                self._note(where, None)
            case Update("msg", {"body": body}, where):
                self._note(where, body)
        return self.answer_unindexed(statement)

    def answer_unindexed(self, statement: Statement) -> list[Any]:
        if isinstance(statement, Lock) and statement.session_ids:
            self.is_of_sessions = True
        return super().answer(statement)

    def _note(self, where: Where, new: bytes | None) -> None:
        found = self._db.execute(*TRANSLATOR.select(Select("msg", ("rowid", "log", "pos", "crc", "body"), where)))
        for rowid, log, pos, crc, body in found:
            is_sound = type(body) is bytes and checksum(body, log, pos) == crc
            self.changed.append(Changed(rowid, log, body if is_sound else b"", new))


def checkpoint(db: apsw.Connection) -> None:
    """Move everything into the database file and empty the write-ahead log, so that erased text is nowhere."""
    busy, _, _ = first_row(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    if busy:
        raise StoreError(
            "The session is erased, but another process is reading, so its text may still stand in the -wal file. "
            "It goes with the next checkpoint; call gc() when the others have read, or close them, to force one."
        )
