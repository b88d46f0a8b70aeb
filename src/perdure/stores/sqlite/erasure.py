"""Erasing from a SQLite file for good: the messages that go are noted for the search index, and pages are scrubbed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import apsw

from perdure.stores.engine import Delete, Job, Lock, Select, Statement, T, Update, Where, drive
from perdure.stores.format.rows import checksum
from perdure.stores.sealed_jobs import translated
from perdure.stores.sealing import Sealing
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.engine import TRANSLATOR, Rows
from perdure.stores.sqlite.schema import exclusively, first_row, meta
from perdure.stores.sqlite.scrub import PAGES_AT_ONCE, overwrite, remains
from perdure.stores.sqlite.search import UNKNOWN, Changed, Erased
from perdure.stores.sqlite.wal import pages_in_log
from perdure.stores.sqlite.worker import require_in_place

# The tables whose rows move when sessions are saved or tokens added, so that names, or what was being said, may be left
# in pages that no erasure touches. All others are appended to, and their rows move in erasures only.
_NAMES = frozenset({"session", "tag", "log", "run", "key", "attached", "sketch", "timer", "token"})
_MOMENT_MS = 5
_PLAIN = Sealing()


class Erasure:
    """One job that erases, and what has to be done after it so that nothing is left of that in the file.

    Nobody waits for long. What takes long is done beside others: moving what was committed into the file, and finding
    pages with remains. `carry_out`, `freeze` and `overwrite` are short, and done in the writer's thread alone.
    """

    def __init__(
        self, path: Path, *, indexed: bool, left: Collection[int] | None = (), sealing: Sealing = _PLAIN
    ) -> None:
        self._sealing = sealing
        self._path = path
        self._indexed = indexed
        self._left = left
        self._todo: list[int] = []
        self._is_counted = False
        self._db: apsw.Connection | None = None
        self.erased = Erased(UNKNOWN, UNKNOWN, 0, ())
        self.touched: frozenset[int] | None = frozenset()
        """The pages that may hold remains, apart from those of names; None if any page may."""

    @property
    def has_erased(self) -> bool:
        return self.erased.after != self._before

    @property
    def is_clean(self) -> bool:
        return self._is_counted and not self._todo

    def move_ahead(self, db: apsw.Connection) -> None:
        """Move what was committed into the file, as far as that goes without anybody's waiting."""
        require_in_place(db)
        with suppress(apsw.BusyError):  # somebody else is about it
            self._own.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def carry_out(self, job: Callable[[], Job[T]], at: float, db: apsw.Connection) -> T:
        """Drive the job in a transaction of its own, and note which pages it touches."""
        require_in_place(db)
        noting = _NotingRows(db, at)
        with exclusively(db):
            self._before = int(meta(db, "erasures"))
            done = drive(translated(job(), self._sealing), noting.answer if self._indexed else noting.answer_unindexed)
            (newest,) = first_row(db, "SELECT coalesce(max(rowid), 0) FROM msg")
            after = int(meta(db, "erasures"))
        self.touched = None
        if noting.is_narrow and self._left is not None:
            # Before the lock is let go: the next to write may begin the log again.
            self.touched = pages_in_log(self._path, db.pragma("page_size")).union(self._left)
        # Where no index has its messages, they were not read.
        before = self._before if self._indexed else UNKNOWN
        self.erased = Erased(before, after, newest, noting.changed)
        return done

    def freeze(self, _: apsw.Connection) -> bool:
        """Have the file stay as it is until `survey` is done. Return whether that could be done: others may be reading.

        Who reads from a file whose log is empty keeps others from moving into it what they commit.
        """
        if not _is_emptied(self._own):
            return False
        if self.touched is not None:
            self._own.execute("BEGIN")
            first_row(self._own, "SELECT 1 FROM meta")
        return True

    def survey(self, _: apsw.Connection) -> None:
        """Find the pages with remains."""
        tables = None if self.touched is None else _NAMES
        self._todo = remains(self._own, self._path, touched=self.touched or (), tables=tables)
        if self.touched is not None:
            self._own.execute("ROLLBACK")

    def overwrite(self, _: apsw.Connection) -> bool:
        """Overwrite some of what remains. Return whether that could be done: others may be reading.

        The first time counts as an erasure: what is indexed before it may be what is being erased.
        """
        if not _is_emptied(self._own):
            return False
        is_first = not self._is_counted
        with exclusively(self._own):
            overwrite(self._own, self._path, self._todo[:PAGES_AT_ONCE])
            self._own.execute("UPDATE meta SET value = value + ? WHERE key = 'erasures'", (int(is_first),))
        if is_first:
            self.erased = self.erased.counted_up_to(int(meta(self._own, "erasures")))
            self._is_counted = True
        del self._todo[:PAGES_AT_ONCE]
        return True

    @property
    def _own(self) -> apsw.Connection:
        """Return a connection beside the writer's: only by another's commit does that forget its pages."""
        if self._db is None:
            self._db = schema.connect(self._path)
        return self._db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class _NotingRows(Rows):
    """Rows that note which messages are deleted or replaced."""

    def __init__(self, db: apsw.Connection, at: float) -> None:
        super().__init__(db, at)
        self.changed: list[Changed] = []
        self.is_narrow = False
        """Whether sessions were named, or tokens erased. If not, everything that is left of any has to go."""

    def answer(self, statement: Statement) -> list[Any]:
        match statement:
            case Delete("msg", where):
                self._note(where, None)
            case Update("msg", {"body": body}, where):
                self._note(where, body)
        return self.answer_unindexed(statement)

    def answer_unindexed(self, statement: Statement) -> list[Any]:
        match statement:
            case Lock(session_ids=ids) if ids:
                self.is_narrow = True
            case Delete("token"):
                self.is_narrow = True
        return super().answer(statement)

    def _note(self, where: Where, new: bytes | None) -> None:
        found = self._db.execute(*TRANSLATOR.select(Select("msg", ("rowid", "log", "pos", "crc", "body"), where)))
        for rowid, log, pos, crc, body in found:
            is_sound = type(body) is bytes and checksum(body, log, pos) == crc
            self.changed.append(Changed(rowid, log, body if is_sound else b"", new))


def _is_emptied(db: apsw.Connection) -> bool:
    """Move everything into the database file and empty the write-ahead log, so that erased text is nowhere.

    Return whether that could be done. Others wait for the lock meanwhile, so that readers are waited for only a moment.
    """
    db.set_busy_timeout(_MOMENT_MS)
    try:
        busy, _, _ = first_row(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.set_busy_timeout(schema.BUSY_MS)
    return not busy
