"""The search index of a SQLite store: a separate file beside the store, which catches up at each search.

A save does not touch it. A search first indexes the messages that were committed since the last one: rowids are in the
order of commits. The index holds words but no texts, and can be rebuilt at any time. What is erased from the store
is erased here too. The index notes the store's count of erasures, which shows if a process was killed in between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import apsw

from perdure import codec
from perdure.errors import CorruptRecord, InvalidData, InvalidSessionId, KeyMissing, KeyUnavailable, StoreError
from perdure.model.message import Message
from perdure.protocols import SearchHit
from perdure.stores.folder import sync_directory
from perdure.stores.format.rows import checksum
from perdure.stores.jobs.finding import MOST_PLACES, number_of
from perdure.stores.sealing import Sealing, is_sealed
from perdure.stores.search import Query, Term, best_of, text_of, words_of
from perdure.stores.sqlite.ranking import Scorer, find, owner_token
from perdure.stores.sqlite.schema import connect, exclusively, first_row, meta, rows_of, search_path
from perdure.stores.sqlite.scrub import PAGES_AT_ONCE, overwrite, remains
from perdure.stores.sqlite.signposts import remove_signposts
from perdure.stores.sqlite.sums import SummedFile, connect_with_sums
from perdure.stores.sqlite.worker import Worker, as_store_error

T = TypeVar("T")

_APPLICATION_ID = 0x70657273  # "pers"
_FORMAT = 3
"""The format's number, raised whenever words are read from messages in another way. Older indexes are rebuilt.

Format 1 left the first words of leaves in place when they were erased. Format 2 had no checksums in its pages.
"""
_CHUNK = 2_000
# Seconds in which an erasure from the store should arrive here. After that its process counts as killed.
_PATIENCE = 2.0
_PAUSE = 0.003
# If others keep writing for this many rounds, a search uses the index as it is.
_ATTEMPTS = 20
# If an index fails again after this many new ones, the store itself is damaged.
_MOST_MADE = 3
_SCHEMA = """
    CREATE TABLE note (key TEXT PRIMARY KEY, value ANY NOT NULL) STRICT, WITHOUT ROWID;
    CREATE TABLE place (id INTEGER PRIMARY KEY, log INTEGER NOT NULL, owner TEXT) STRICT;
    CREATE VIRTUAL TABLE message USING fts5(text, place, content='', tokenize='unicode61');
    INSERT INTO message(message, rank) VALUES ('secure-delete', 1);
"""
# A part of its own, since an index of an earlier release has no ids. Its cursor and count of erasures are separate too:
# an earlier release erases words, and does not know of ids.
_NAMES = """
    CREATE TABLE IF NOT EXISTS named (number INTEGER, id INTEGER, PRIMARY KEY (number, id)) STRICT, WITHOUT ROWID
"""


def is_index(db: apsw.Connection) -> bool:
    """Tell whether a file is an index as this release writes it."""
    return (db.pragma("application_id"), db.pragma("user_version")) == (_APPLICATION_ID, _FORMAT)


def has_sums(header: bytes) -> bool:
    """Tell whether a file has checksums in its pages. Its header says so: the format, and the application's id."""
    return header[60:64] == _FORMAT.to_bytes(4, "big") and header[68:72] == _APPLICATION_ID.to_bytes(4, "big")


class Changed(NamedTuple):
    """A message that was erased, or that has another text now."""

    rowid: int
    log: int
    old: bytes
    new: bytes | None = None


UNKNOWN = -1
"""The count of erasures if it is not known what has been erased. The index is then made again."""


class Erased(NamedTuple):
    """The changes of one erasure: the count of erasures before and after it, and the last rowid that it has left."""

    before: int
    after: int
    newest: int
    changed: Sequence[Changed]

    def counted_up_to(self, count: int) -> Erased:
        """Return the same, counting the removal of its traces as an erasure too. UNKNOWN if others came between."""
        return self._replace(before=self.before if count == self.after + 1 else UNKNOWN, after=count)


class SearchThread:
    """A thread that searches, started when it is first needed."""

    def __init__(self, path: Path, sealing: Sealing) -> None:
        self._path = path
        self._index = SearchIndex(path, sealing)
        self._starting = threading.Lock()
        self._worker: Worker | None = None

    async def search(self, query: Query) -> list[SearchHit]:
        look = partial(self._index.search, query=query)
        return await self._indexed(look, self._index.index_some) if query.terms else []

    async def named(self, message_id: str) -> list[tuple[int, int]]:
        """Return the logs and positions where messages with an id may be, the newest first."""
        number = number_of(message_id)
        return await self._indexed(partial(self._index.named, number=number), self._index.name_some)

    async def _indexed(
        self, look: Callable[..., list[T] | None], index_some: Callable[[apsw.Connection], int | None]
    ) -> list[T]:
        """Index what is lacking, then look. Repeat both if the index has fallen behind in between.

        These are separate jobs, since the index may have to wait for an erasure that itself waits for this thread.
        """
        found: list[T] | None = None
        for attempt in range(1, _ATTEMPTS + 1):
            if found is None:
                while await self._run(index_some) is not None:
                    pass  # between two pieces, other searches and a cancellation get their turn
                found = await self._run(partial(look, surely=attempt == _ATTEMPTS))
        return found or []

    async def index(self, *, rebuild: bool, progress: Callable[[int, int], None] | None) -> int:
        """Index what is not indexed yet, and return how many messages that were.

        It is done in pieces, so that other searches and a cancellation get their turn.
        """
        if rebuild:
            await self._run(self._index.forget)
        lacking: int = await self._run(self._index.lacking)
        done = 0
        while (step := await self._run(self._index.index_some)) is not None:
            done += step
            if progress is not None:
                progress(done, max(done, lacking))
        return done

    @property
    def is_indexed(self) -> bool:
        """Return whether there is an index, from which something may have to be erased."""
        return self._index.path.exists()

    async def erase(self, erased: Erased) -> None:
        """Erase from the index what has been erased from the store, whose count of erasures is now `after`."""
        if self.is_indexed:
            await self._run(partial(self._index.erase, erased=erased))

    async def _run(self, job: Callable[[apsw.Connection], T]) -> T:
        with self._starting:
            if self._worker is None:
                self._worker = Worker(f"perdure search {self._path.name}", partial(connect, self._path, reader=True))
        result: T = await self._worker.run(job, alone=True)
        return result

    async def close(self) -> None:
        if self._worker is not None:
            await self._worker.close(lambda _: self._index.close())


class SearchIndex:
    """The index, for the use of one thread. Every method takes a reading connection to the store."""

    def __init__(self, main: Path, sealing: Sealing) -> None:
        self.path = search_path(main)
        self._sealing = sealing
        self._open: _IndexFile | None = None
        self._rebuilt = 0
        """The number of times that the index was rebuilt since it last worked."""

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def search(self, db: apsw.Connection, query: Query, surely: bool) -> list[SearchHit] | None:
        """Search what is indexed. Return None if something is lacking, unless `surely` is set."""
        try:
            return self._surely(lambda index: _search(index, db, query, surely))
        except (InvalidSessionId, InvalidData, TypeError) as error:  # a damaged row of the store
            raise CorruptRecord(None, "of the database file", str(error)) from None

    def named(self, db: apsw.Connection, number: int, surely: bool) -> list[tuple[int, int]] | None:
        """Return where messages with a number may be. Return None if something is lacking, unless `surely` is set."""
        return self._surely(lambda index: _named(index, db, number, surely))

    def forget(self, db: apsw.Connection) -> None:
        """Empty the index, so that it is rebuilt."""
        self._surely(lambda index: _forget(index, db))

    def lacking(self, db: apsw.Connection) -> int:
        """Return how many messages are not indexed yet."""
        return self._surely(lambda index: _lacking(index, db))

    def index_some(self, db: apsw.Connection) -> int | None:
        """Index some messages and return how many; None if none is lacking."""
        return self._surely(lambda index: _index_what_lacks(index, db, WORDS))

    def name_some(self, db: apsw.Connection) -> int | None:
        """Index the ids of some messages alone, which takes a fraction of the time."""
        return self._surely(lambda index: _index_what_lacks(index, db, NAMES))

    def erase(self, db: apsw.Connection, erased: Erased) -> None:
        try:
            self._surely(lambda index: _erase(index, db, erased))
            self.close()
            _leave_no_trace(self.path)
            # A power cut could bring back the journal of the last transaction, with the words that were erased in it.
            sync_directory(self.path.parent)
        except KeyMissing:  # an erasure does not need the keys: the next search makes the index again
            self._remove()
        except apsw.BusyError:
            raise StoreError(
                "It is erased from the store. Its words are still in the search index, which another process holds: "
                "call gc(), or perdure gc, to erase them there too."
            ) from None

    def _surely(self, job: Callable[[_IndexFile], T]) -> T:
        """Run a job with the index. If the index is damaged or gone, run the job with a new one."""
        try:
            return self._done(job)
        except (apsw.CorruptError, apsw.NotADBError, apsw.ConstraintError, _Gone) as error:
            # If new indexes fail in the same way again and again, the store itself is damaged.
            self._rebuilt += 1
            if self._rebuilt > _MOST_MADE:
                self._rebuilt = 0
                raise CorruptRecord(None, "of the database file", f"it cannot be indexed ({error})") from None
            self._remove()
        try:
            return self._done(job)
        except apsw.Error as error:
            raise as_store_error(error) from None

    def _remove(self) -> None:
        self.close()
        self.path.unlink(missing_ok=True)
        self.path.with_name(self.path.name + "-journal").unlink(missing_ok=True)

    def _done(self, job: Callable[[_IndexFile], T]) -> T:
        done = job(self._opened())
        if done != 0:  # messages were indexed, or none is lacking, or something was found
            self._rebuilt = 0
        return done

    def _opened(self) -> _IndexFile:
        if self._open is not None and not self._open.is_in_place():
            self.close()
        if self._open is None:
            self._open = _IndexFile(self.path, self._sealing)
        return self._open


class _Gone(Exception):
    """The error for an index that lacks what it has noted, or that this release cannot use."""


class _IndexFile:
    """The open file."""

    def __init__(self, path: Path, sealing: Sealing) -> None:
        self.path = path
        self.sealing = sealing
        self.db = _connected(path)
        try:
            found = os.stat(path, follow_symlinks=False)
            self._identity = (found.st_dev, found.st_ino)
            _prepare(self.db, path)
            self.db.execute(_NAMES)
            self._require_form()
            self.scorer = Scorer(self.db)
            self.behind_since: float | None = None
            self.reached: dict[_Part, int] = {}
            """The last rowid in each part when nothing was lacking: a search need not find what came after it."""
        except BaseException:
            self.db.close()
            raise

    def _require_form(self) -> None:
        """Require words in the index of a store without keys, and tokens that stand for words in one with keys.

        An index that was made before there were keys contains the words themselves. It is rebuilt.
        """
        is_blind = bool(self.note("blind"))
        if is_blind and not self.sealing.is_on:
            raise KeyMissing(None, has_ring=False)
        if self.sealing.is_on and not is_blind:
            if self.note("cursor"):
                raise _Gone
            self.take_note(blind=1)

    def message(self, body: bytes, *row: int) -> Message | None:
        """Return a message; None if its row is damaged or its key is gone, which a load reports."""
        if is_sealed(body):
            try:
                body, crc = self.sealing.opened("msg", body)
            except KeyUnavailable:
                if not self.sealing.is_on:
                    raise
                return None
            row = (*row[:2], -1 if crc is None else crc) if row else ()
        return _message(body, *row)

    def words(self, message: Message | None, owner: str | None) -> str:
        """Return the words of a message, folded. With keys, return the tokens that stand for them."""
        if message is None:
            return ""
        words = words_of(text_of(message))
        return " ".join(self.sealing.root(owner).words(words) if self.sealing.is_on else words)

    def is_overdue(self) -> bool:
        """Tell whether an erasure from the store has been waited for long enough. Its process may have been killed."""
        self.behind_since = self.behind_since or time.monotonic()
        return time.monotonic() > self.behind_since + _PATIENCE

    def is_in_place(self) -> bool:
        """Tell whether the name is still this file's. Another process may have made the index again."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return self._identity == (found.st_dev, found.st_ino)

    def close(self) -> None:
        self.db.close()

    def note(self, key: str) -> Any:
        found = first_row(self.db, "SELECT value FROM note WHERE key = ?", (key,))
        return None if found is None else found[0]

    def take_note(self, **values: Any) -> None:
        self.db.executemany("INSERT OR REPLACE INTO note VALUES (?, ?)", list(values.items()))

    def clear(self, uid: str, erasures: int) -> None:
        """Forget everything. `secure_delete` overwrites it."""
        self.db.execute("INSERT INTO message(message) VALUES ('delete-all')")
        self.db.execute("DELETE FROM place")
        self.take_note(uid=uid, erasures=erasures, cursor=0)
        self.clear_names(erasures)
        self.behind_since = None

    def clear_names(self, erasures: int) -> None:
        """Forget the ids, which are quickly read again."""
        self.db.execute("DELETE FROM named")
        self.take_note(named=0, named_erasures=erasures)


def _wait_for_lock(tries: int) -> bool:
    """Ask again every millisecond for 10 s. A process that indexes much releases the lock only for a moment."""
    time.sleep(0.001)
    return tries < 10_000


def _connected(path: Path) -> apsw.Connection:
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    db = connect_with_sums(path, has_sums)
    db.set_busy_handler(_wait_for_lock)
    # Without a write-ahead log: what has been erased must not stay there until the last reader closes the file.
    db.execute("PRAGMA journal_mode = delete").fetchall()
    db.execute("PRAGMA secure_delete = 1").fetchall()
    # FULL, though an index can be rebuilt. At NORMAL the journal says how many pages it holds before they are surely
    # on disk: after a power cut, SQLite would put back a page that was never written.
    db.execute("PRAGMA synchronous = 2").fetchall()
    db.execute("PRAGMA cache_size = -65536").fetchall()
    return db


def _prepare(db: apsw.Connection, path: Path) -> None:
    """Create the tables, unless they are there."""
    if is_index(db):
        return
    with exclusively(db):
        if is_index(db):  # another process has made it meanwhile
            return
        if db.pragma("application_id") == _APPLICATION_ID:
            raise _Gone  # another release's: it is removed and made again
        if db.pragma("application_id") or db.execute("SELECT 1 FROM sqlite_schema").fetchall():
            raise StoreError(f"{path} is not a search index of perdure's. Move it away; the index goes there.")
        db.execute(_SCHEMA).fetchall()
        db.pragma("user_version", _FORMAT)
        db.pragma("application_id", _APPLICATION_ID)


@contextmanager
def _snapshot(db: apsw.Connection) -> Iterator[None]:
    """Read one state of the file within the block."""
    db.execute("BEGIN")
    try:
        yield
    finally:
        db.execute("ROLLBACK")


class _Part(NamedTuple):
    """A part of the index: the names of its two notes, how far it has read, and after which erasure."""

    cursor: str
    erasures: str


WORDS, NAMES = _Part("cursor", "erasures"), _Part("named", "named_erasures")


def _index_what_lacks(index: _IndexFile, db: apsw.Connection, part: _Part) -> int | None:
    reached = _reached(index, db, part)
    if reached is None:
        return _step(index, db, part)
    index.reached[part] = reached
    return None


def _step(index: _IndexFile, db: apsw.Connection, part: _Part) -> int:
    """Index some messages and return how many. If an erasure does not arrive here in time, begin again."""
    done = 0
    with exclusively(index.db), _snapshot(db):
        uid, erasures = meta(db, "uid"), meta(db, "erasures")
        if (index.note("uid"), index.note(part.erasures)) == (uid, erasures):
            index.behind_since = None
            done = _index_some(index, db, part)
        elif index.note("uid") == uid and part is NAMES:
            index.clear_names(erasures)
        elif index.note("uid") != uid or index.is_overdue():
            index.clear(uid, erasures)
    if not 0 < done < _CHUNK:
        time.sleep(_PAUSE)  # a process that erases from the store has to erase here too, and wants the lock
    return done


def _forget(index: _IndexFile, db: apsw.Connection) -> None:
    with exclusively(index.db), _snapshot(db):
        index.clear(meta(db, "uid"), meta(db, "erasures"))


def _lacking(index: _IndexFile, db: apsw.Connection) -> int:
    with _snapshot(index.db), _snapshot(db):
        noted, known = ((index.note("uid"), index.note("erasures")), (meta(db, "uid"), meta(db, "erasures")))
        cursor = index.note("cursor") if noted == known else 0
        (number,) = first_row(db, "SELECT count(*) FROM msg WHERE rowid > ?", (cursor,))
    return int(number)


def _reached(index: _IndexFile, db: apsw.Connection, part: _Part, least: int | None = None) -> int | None:
    """Return the last rowid in the index. Return None if it lacks something of the store, or up to `least` if given."""
    noted = dict(rows_of(index.db, "SELECT key, value FROM note", ()))
    uid, erasures, newest = first_row(
        db,
        "SELECT (SELECT value FROM meta WHERE key = 'uid'), (SELECT value FROM meta WHERE key = 'erasures'),"
        " (SELECT coalesce(max(rowid), 0) FROM msg)",
    )
    if (noted.get("uid"), noted.get(part.erasures)) != (uid, erasures):
        return None
    wanted = newest if least is None else min(least, newest)
    return noted[part.cursor] if noted[part.cursor] >= wanted else None


_OWNER = """
    WITH RECURSIVE showing (sid, since) AS (
        SELECT child, since FROM ref WHERE log = ?1
        UNION SELECT session.sid, NULL FROM session JOIN showing ON session.line = showing.sid
        WHERE showing.since IS NULL
    )
    SELECT coalesce(
        (SELECT owner FROM log JOIN session USING (sid) WHERE log.log = ?1),
        (SELECT owner FROM showing JOIN session USING (sid) WHERE owner IS NOT NULL ORDER BY sid LIMIT 1))
"""


def _index_some(index: _IndexFile, db: apsw.Connection, part: _Part) -> int:
    cursor = index.note(part.cursor)
    sql = "SELECT rowid, log, pos, crc, body FROM msg WHERE rowid > ? ORDER BY rowid LIMIT ?"
    rows = rows_of(db, sql, (cursor, _CHUNK))
    _require_order(db, cursor, [row[0] for row in rows])
    if not rows:
        return 0
    if part is NAMES:
        _add_names(index, rows)
    else:
        _add_words(index, db, rows)
    index.take_note(**{part.cursor: rows[-1][0]})
    return len(rows)


def _require_order(db: apsw.Connection, cursor: int, rowids: Sequence[int]) -> None:
    """Raise CorruptRecord if the rows behind the cursor are out of order, or do not lead to the last one.

    A damaged tree can claim more rows and return none. Asking again would never end.
    """
    is_in_order = all(before < after for before, after in pairwise((cursor, *rowids)))
    if not is_in_order or (not rowids and first_row(db, "SELECT coalesce(max(rowid), 0) FROM msg")[0] > cursor):
        raise CorruptRecord(None, "of the table msg", "its rows are out of order, or the last ones are not found")


def _add_names(index: _IndexFile, rows: Sequence[Any]) -> None:
    held = ((rowid, index.message(body, log, pos, crc)) for rowid, log, pos, crc, body in rows)
    names = [(number_of(message.id), rowid) for rowid, message in held if message is not None]
    index.db.executemany(_NAME, sorted(names))


_NAME = "INSERT INTO named VALUES (?, ?)"


def _add_words(index: _IndexFile, db: apsw.Connection, rows: Sequence[Any]) -> None:
    for log, group in groupby(rows, key=itemgetter(1)):
        (owner,) = first_row(db, _OWNER, (log,))
        places = _tokens(log, owner)
        held = [(rowid, index.words(index.message(body, log, pos, crc), owner)) for rowid, _, pos, crc, body in group]
        index.db.executemany("INSERT INTO place VALUES (?, ?, ?)", [(rowid, log, owner) for rowid, _ in held])
        index.db.executemany(
            "INSERT INTO message(rowid, text, place) VALUES (?, ?, ?)",
            [(rowid, words, places) for rowid, words in held],
        )


def _message(body: bytes, *row: int) -> Message | None:
    """Return a message; None if its row is damaged, which a load reports."""
    if row and (type(body) is not bytes or checksum(body, *row[:2]) != row[2]):
        return None
    try:
        return codec.decode_message(body)
    except InvalidData:
        return None


def _tokens(log: int, owner: str | None) -> str:
    """Return words that stand for a message's log and its owner, so that a search can be narrowed to them."""
    return f"l{log}" if owner is None else f"l{log} {owner_token(owner)}"


def _search(index: _IndexFile, db: apsw.Connection, query: Query, surely: bool) -> list[SearchHit] | None:
    with _snapshot(index.db), _snapshot(db):
        if surely or _reached(index, db, WORDS, index.reached.get(WORDS)) is not None:
            return _find(index, db, query)
    return None


def _find(index: _IndexFile, db: apsw.Connection, query: Query) -> list[SearchHit]:
    """Return the best hits. With keys, each owner has other tokens for a word, so the index is asked for each owner."""
    sealing = index.sealing
    if not sealing.is_on:
        return find(index.db, index.scorer, db, query, query.terms, sealing)
    owners = [(query.owner,)] if query.owner is not None else rows_of(index.db, "SELECT DISTINCT owner FROM place", ())
    hits: list[SearchHit] = []
    for (owner,) in owners:
        root = sealing.known_root(owner)
        if root is not None:
            terms = tuple(Term(tuple(root.words(term.words))) for term in query.terms)
            hits += find(index.db, index.scorer, db, query, terms, sealing)
    return best_of(hits, query.limit)


def _named(index: _IndexFile, db: apsw.Connection, number: int, surely: bool) -> list[tuple[int, int]] | None:
    with _snapshot(index.db), _snapshot(db):
        if not surely and _reached(index, db, NAMES, index.reached.get(NAMES)) is None:
            return None
        rowids = rows_of(index.db, _NUMBERED, (number, MOST_PLACES))
        rows = [first_row(db, "SELECT log, pos FROM msg WHERE rowid = ?", rowid) for rowid in rowids]
    return [row for row in rows if row is not None]


_NUMBERED = "SELECT id FROM named WHERE number = ? ORDER BY id DESC LIMIT ?"


def _erase(index: _IndexFile, db: apsw.Connection, erased: Erased) -> None:
    """Take out the words of what has been erased. If another erasure came between, take out all words."""
    with exclusively(index.db), _snapshot(db):
        uid, erasures = meta(db, "uid"), meta(db, "erasures")
        noted = (index.note("uid"), index.note("erasures"))
        if noted != (uid, erased.before) or erasures != erased.after:
            index.clear(uid, erasures)
            return
        cursor = index.note("cursor")
        changed = [each for each in erased.changed if each.rowid <= cursor]
        if any(is_sealed(each.old) and index.message(each.old) is None for each in changed):
            index.clear(uid, erasures)  # its key is gone, so its words cannot be taken out one by one
            return
        gone = [_exchange(index, each) for each in changed]
        remove_signposts(index.db, gone)
        index.take_note(erasures=erasures, cursor=min(cursor, erased.newest))
        if index.note("named_erasures") == erased.before:
            _erase_names(index, erased)


def _erase_names(index: _IndexFile, erased: Erased) -> None:
    """Take out the ids of erased messages. A message that only has another text keeps its id."""
    reached = index.note("named")
    gone = [
        (index.message(each.old), each.rowid) for each in erased.changed if each.new is None and each.rowid <= reached
    ]
    numbers = [(number_of(message.id), rowid) for message, rowid in gone if message is not None]
    index.db.executemany("DELETE FROM named WHERE number = ? AND id = ?", numbers)
    index.take_note(named=min(reached, erased.newest), named_erasures=erased.after)


def _exchange(index: _IndexFile, changed: Changed) -> str:
    """Take out the words of a message, or replace them. Return those that it had."""
    row = first_row(index.db, "SELECT log, owner FROM place WHERE id = ?", (changed.rowid,))
    if row is None or row[0] != changed.log:
        raise _Gone
    tokens, owner = _tokens(*row), row[1]
    had = index.words(index.message(changed.old), owner)
    index.db.execute(
        "INSERT INTO message(message, rowid, text, place) VALUES ('delete', ?, ?, ?)",
        (changed.rowid, had, tokens),
    )
    if changed.new is None:
        index.db.execute("DELETE FROM place WHERE id = ?", (changed.rowid,))
    else:
        words = index.words(index.message(changed.new), owner)
        index.db.execute("INSERT INTO message(rowid, text, place) VALUES (?, ?, ?)", (changed.rowid, words, tokens))
    return had


def _leave_no_trace(path: Path) -> None:
    """Overwrite what SQLite has left in the unused parts of pages."""
    db = _connected(path)
    try:
        todo = remains(db, path)
        while todo:  # other searches can run in between
            with exclusively(db):
                overwrite(db, path, todo[:PAGES_AT_ONCE], SummedFile)
                # A change of a row, so that the commit makes other connections drop their cached pages.
                db.execute("UPDATE note SET value = value WHERE key = 'cursor'")
            del todo[:PAGES_AT_ONCE]
    finally:
        db.close()
