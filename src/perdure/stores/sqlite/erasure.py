"""Erasure from a SQLite file: what is erased is noted for the search index, and scrubbed from the pages."""

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

# The rows of these tables move when sessions are saved or tokens added. So names, or what was being said, may be left
# in pages that no erasure touches. All other tables are only appended to, and their rows move in erasures alone.
_NAMES = frozenset({"session", "tag", "log", "run", "key", "attached", "sketch", "timer", "token"})
_MOMENT_MS = 5
_PLAIN = Sealing()


class Erasure:
    """One job that erases, and the steps after it that leave nothing of that in the file.

    No caller waits for long. The long steps run beside other work: moving what was committed into the file, and finding
    pages with remains. `carry_out`, `freeze` and `overwrite` are short, and run alone in the writer's thread.
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
        """The pages that may hold remains, besides those of the tables in `_NAMES`; None if any page may."""

    @property
    def has_erased(self) -> bool:
        return self.erased.after != self._before

    @property
    def is_clean(self) -> bool:
        return self._is_counted and not self._todo

    def move_ahead(self, db: apsw.Connection) -> None:
        """Move what was committed into the file, as far as that is possible without waiting."""
        require_in_place(db)
        with suppress(apsw.BusyError):  # another connection is doing it
            self._own.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)

    def carry_out(self, job: Callable[[], Job[T]], at: float, db: apsw.Connection) -> T:
        """Run the job in a transaction of its own, and note which pages it touches."""
        require_in_place(db)
        noting = _NotingRows(db, at)
        with exclusively(db):
            self._before = int(meta(db, "erasures"))
            done = drive(translated(job(), self._sealing), noting.answer if self._indexed else noting.answer_unindexed)
            (newest,) = first_row(db, "SELECT coalesce(max(rowid), 0) FROM msg")
            after = int(meta(db, "erasures"))
        self.touched = None
        if noting.is_narrow and self._left is not None:
            # Before the lock is released: the next writer may begin the log again.
            self.touched = pages_in_log(self._path, db.pragma("page_size")).union(self._left)
        # Without an index, the erased messages were not noted.
        before = self._before if self._indexed else UNKNOWN
        self.erased = Erased(before, after, newest, noting.changed)
        return done

    def freeze(self, _: apsw.Connection) -> bool:
        """Keep the file as it is until `survey` is done. Return False if readers prevent that.

        A reader that began while the log was empty keeps others from moving their commits into the file.
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
        """Overwrite some of the remains. Return False if readers prevent that.

        The first time counts as an erasure: what was indexed before it may be what is being erased.
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
        """Return a connection besides the writer's, which drops its cached pages only when another one commits."""
        if self._db is None:
            self._db = schema.connect(self._path)
        return self._db

    def close(self) -> None:
        if self._db is not None:
            self._db.close()


class _NotingRows(Rows):
    """A `Rows` that notes which messages are deleted or replaced."""

    def __init__(self, db: apsw.Connection, at: float) -> None:
        super().__init__(db, at)
        self.changed: list[Changed] = []
        self.is_narrow = False
        """True if sessions were named, or tokens erased. If not, what is left of any session has to go."""

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
            # A damaged message is indexed without words, so none of it has to be taken out.
            is_sound = type(body) is bytes and checksum(body, log, pos) == crc
            self.changed.append(Changed(rowid, log, body if is_sound else b"", new))


def _is_emptied(db: apsw.Connection) -> bool:
    """Move everything into the database file and empty the write-ahead log, which may hold erased text.

    Return False if readers prevent that. Other writers wait meanwhile, so this waits for readers only a moment.
    """
    db.set_busy_timeout(_MOMENT_MS)
    try:
        busy, _, _ = first_row(db, "PRAGMA wal_checkpoint(TRUNCATE)")
    finally:
        db.set_busy_timeout(schema.BUSY_MS)
    return not busy
