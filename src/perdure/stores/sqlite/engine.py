"""The tables in a SQLite file: one thread that writes, a few that read, and a connection for short reads."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import apsw
import msgspec

from perdure.aio import finish_despite_cancel
from perdure.errors import CorruptRecord, PerdureError, StoreError
from perdure.model.ids import now
from perdure.protocols import Problem, SearchHit
from perdure.stores.engine import (
    Change,
    Clock,
    Count,
    Delete,
    Fetch,
    IndexedEngine,
    Insert,
    Job,
    Kind,
    Request,
    Row,
    Select,
    Statement,
    T,
    Update,
    drive,
)
from perdure.stores.file_lock import FileLock
from perdure.stores.format.rows import Batch
from perdure.stores.jobs.claiming import COLUMNS_OF_FACTS, Facts
from perdure.stores.jobs.listing import HeaderRow, Page
from perdure.stores.jobs.loading import Load, Loaded, exists
from perdure.stores.jobs.saving import (
    BATCH_COLUMNS,
    RUN_COLUMNS,
    RUN_GROWS,
    Append,
    Draft,
    Keep,
    KeepAll,
    Place,
    place_of,
    row_of_batch,
    row_of_head,
    rows_of_messages,
    rows_of_runs,
)
from perdure.stores.sealed_jobs import Owner, translated
from perdure.stores.sealing import Sealing
from perdure.stores.sql import Adapter, Again, Dialect, Steps, Translator
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.deferred import DeferredRows
from perdure.stores.sqlite.glimpse import Patience, read_short
from perdure.stores.sqlite.readers import Readers
from perdure.stores.sqlite.schema import connect, connect_to_write, lock_path, meta, prepare, search_path
from perdure.stores.sqlite.worker import DiskFailed, WritingWorker, as_store_error, require_in_place

if TYPE_CHECKING:
    from perdure.stores.copies import Deposit, Landing, Outline
    from perdure.stores.search import Query
    from perdure.stores.sqlite.erasure import Erasure
    from perdure.stores.sqlite.search import SearchThread

# Seconds before an erasure tries again after a reader has held it up.
_PAUSE = 0.01
_BRIEF = 64
"""A change with at most this many messages may be committed in the event loop's thread."""
_MAY_BE_BRIEF = (Keep, Append)
_ERASURES = "(SELECT value FROM meta WHERE key = 'erasures')"
_PEEK = f"SELECT version, {_ERASURES} FROM session WHERE id = ?"
_FACTS = f"SELECT {', '.join(COLUMNS_OF_FACTS)}, {_ERASURES} FROM session WHERE id = ?"


class SqliteEngine(IndexedEngine):
    """An engine that keeps the tables in a SQLite file."""

    can_be_sealed = True

    def __init__(self, path: Path, lock_timeout: float, *, commit_in_loop: bool = False) -> None:
        self._path = path
        self._timeout = lock_timeout
        self._commits_in_loop = commit_in_loop
        self._open: OpenFile | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @property
    def origin(self) -> str:  # type: ignore[override]  # it is read only
        return "" if self._open is None else self._open.origin

    @property
    def opened(self) -> OpenFile:
        """Return the open file. Raise StoreError if the store is not open, or was opened by another process."""
        if self._open is None:
            raise StoreError("This store is not open. Use it inside `async with SqliteStore(path) as store:`.")
        self._open.check_process()
        return self._open

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise StoreError("This store is open already.")
        path = await asyncio.to_thread(prepare, self._path, self._timeout)
        self._open = OpenFile(path, self._timeout, self.sealing, commit_in_loop=self._commits_in_loop)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            await finish_despite_cancel(opened.close())

    async def run(self, job: Callable[[], Job[T]], kind: Kind = "read", *, long: bool = False) -> T:
        at = now().timestamp()
        if kind == "erase":
            return await self._erase(job, at)
        if kind == "write":
            driven = partial(_drive, job, at, self.sealing, deferred=self.opened.deferred)
            return await self.opened.writer.run(driven)  # type: ignore[no-any-return]
        driven = partial(_drive, job, at, self.sealing)
        if kind == "glance":
            return self.opened.look(driven)
        return await self.opened.readers.run(driven, long=long)  # type: ignore[no-any-return]

    async def commit(self, change: Change) -> Any:
        opened = self.opened
        job = partial(_commit, change, now().timestamp(), self.sealing, opened.deferred)
        is_brief = isinstance(change, _MAY_BE_BRIEF) and len(change.messages) <= _BRIEF and not change.attachments
        return await opened.writer.ask(job, change.finish, brief=is_brief)

    async def commit_all(self, change: Change) -> Any:
        assert isinstance(change, KeepAll)
        opened = self.opened
        job = partial(_commit_all, change, now().timestamp(), self.sealing, opened.deferred)
        said, has_files = (
            sum(len(keep.messages) for keep in change.keeps),
            any(keep.attachments for keep in change.keeps),
        )
        return await opened.writer.ask(job, change.finish, brief=said <= _BRIEF and not has_files)

    def is_as_known(self, load: Fetch[Any]) -> bool:
        assert isinstance(load, Load)
        assert load.known is not None
        opened = self._open
        if opened is None:
            return False
        try:
            seen = opened.peek(_PEEK, (str(load.session_id),))
        except StoreError:  # the load that follows reports it, or the store is being closed
            return False
        return bool(seen == (load.known.session.version, load.known.erasures))

    async def fetch(self, load: Fetch[Any]) -> Any:
        if isinstance(load, Load) and load.known is not None and load.may_be_at_hand:
            # One statement is enough for most loads. If the session has changed, the job reads it.
            seen = self.opened.peek(_PEEK, (str(load.session_id),))
            if seen == (load.known.session.version, load.known.erasures):
                return Loaded(load.known.erasures)
        found = self.opened.glimpse(load, self.sealing) if isinstance(load, Load) and load.version is None else None
        return await self.run(load.job) if found is None else found

    async def page(self, page: Request[Any]) -> Any:
        if not isinstance(page, Page):
            return await super().page(page)
        rows: list[HeaderRow] = await self.opened.readers.run(partial(_read_page, page))
        if not rows and page.query.id is not None:  # raises CorruptRecord if a damaged index of ids hides it
            await self.run(partial(exists, page.query.id), "glance")
        return rows

    async def _erase(self, job: Callable[[], Job[T]], at: float) -> T:
        """Run a job that erases, then remove every trace of what it erased from the file and the search index."""
        # Imported here, since that module imports this one.
        from perdure.stores.sqlite.erasure import Erasure

        opened = self.opened
        # Pages that an earlier erasure could not clean. If this one fails too, it gives them back below.
        left, opened.left = opened.left, frozenset()
        indexed = search_path(opened.path).exists()
        erasure = Erasure(opened.path, indexed=indexed, left=left, sealing=self.sealing)
        # A caller that is cancelled waits for the step under way: a thread is using the erasure's connection.
        try:
            await finish_despite_cancel(opened.readers.run(erasure.move_ahead, alone=True, long=True))
            done: T = await finish_despite_cancel(opened.writer.run(partial(erasure.carry_out, job, at), alone=True))
            if erasure.has_erased:
                await self._leave_no_trace(erasure)
            else:
                opened.leave(left)
            return done
        except BaseException as error:
            opened.leave(None if erasure.touched is None or left is None else erasure.touched | left)
            if isinstance(error, DiskFailed):  # it may have been a sync, in another thread than the writer's
                raise opened.writer.refuse_more(error.error) from None
            raise
        finally:
            erasure.close()

    async def _leave_no_trace(self, erasure: Erasure) -> None:
        opened = self.opened
        await self._surely(erasure, erasure.freeze)
        await finish_despite_cancel(opened.readers.run(erasure.survey, alone=True, long=True))
        while not erasure.is_clean:  # the lock is free between two steps, so that others can write
            await self._surely(erasure, erasure.overwrite)
        # After the first `overwrite`, which raises the count of erasures that the index has to note.
        if search_path(opened.path).exists():
            await opened.searching.erase(erasure.erased)

    async def _surely(self, erasure: Erasure, step: Callable[[apsw.Connection], bool]) -> None:
        """Repeat a step until no reader holds it up. Raise StoreError after SQLite's own busy time-out."""
        deadline = time.monotonic() + schema.BUSY_MS / 1000
        while True:
            await finish_despite_cancel(self.opened.readers.run(erasure.move_ahead, alone=True, long=True))
            if await finish_despite_cancel(self.opened.writer.run(step, alone=True)):
                return
            if time.monotonic() > deadline:
                raise StoreError(
                    "The session is erased, but another process is reading, so its text may still be in the -wal "
                    "file. To remove it, call gc() once the others have stopped reading, or close them."
                )
            await asyncio.sleep(_PAUSE)

    async def search(self, query: Query) -> Sequence[SearchHit]:
        return await self.opened.searching.search(query)

    async def named(self, message_id: str) -> Sequence[tuple[int, int]]:
        return await self.opened.searching.named(message_id)

    async def index(self, *, rebuild: bool, progress: Callable[[int, int], None] | None) -> int:
        return await self.opened.searching.index(rebuild=rebuild, progress=progress)

    async def faults(self) -> Sequence[Problem]:
        from perdure.stores.sqlite.check import faults

        found: Sequence[Problem] = await self.opened.readers.run(faults)
        return found

    async def mend(self, *, dry_run: bool) -> Sequence[Problem]:
        from perdure.stores.sqlite.check import faults
        from perdure.stores.sqlite.mending import mend, mendable
        from perdure.stores.sqlite.search_check import check_index

        opened = self.opened

        def searched(db: apsw.Connection) -> list[Problem]:
            return [*check_index(db, opened.path)]

        # `mend` keeps all writers out, so it runs only if something is wrong.
        found = [*await opened.readers.run(mendable, long=True)]
        if not dry_run and await opened.readers.run(faults, long=True):
            found = [*await opened.writer.run(mend, alone=True)]
        lacking: list[Problem] = await opened.readers.run(searched, long=True)
        if lacking and not dry_run:
            try:
                await opened.searching.index(rebuild=True, progress=None)
            except CorruptRecord:  # the messages cannot be read; the check reports that, and all else is repaired
                return found
        return [*found, *lacking]

    kind = "sqlite"

    async def copy_out(self, deposit: Deposit) -> Outline:
        from perdure.stores.sqlite.copying import copy_out

        job = partial(copy_out, self.opened.path, self._timeout, deposit)
        made: Outline = await self.opened.readers.run(job, alone=True, long=True)
        return made

    def landing(self) -> Landing:
        from perdure.stores.sqlite.copying import SqliteLanding

        return SqliteLanding(self._path, self._timeout, lambda path: SqliteEngine(path, self._timeout))


class OpenFile:
    """An open file: its threads, and a connection for reading a row or two in the caller's thread."""

    def __init__(self, path: Path, lock_timeout: float, sealing: Sealing, *, commit_in_loop: bool = False) -> None:
        self.path = path
        self._sealing = sealing
        self._pid = os.getpid()
        self._peeking = threading.Lock()
        self._peeker = connect(path, reader=True)
        self._patience = Patience()
        try:
            self.origin = str(_looked_at(self._peeker, meta, "uid"))
        except BaseException:
            self._peeker.close()
            raise
        self._lock = FileLock(lock_path(path), lock_timeout)
        self.deferred = DeferredRows()
        name = f"perdure writer {path.name}"
        self.writer = WritingWorker(
            name, partial(connect_to_write, path), self._lock, self.deferred, in_loop=commit_in_loop
        )
        self.readers = Readers(f"perdure reader {path.name}", self._connected_again)
        self._searching: SearchThread | None = None
        self.left: frozenset[int] | None = frozenset()
        """The pages in which an unfinished erasure may have left text; None if any page may hold some."""

    def leave(self, left: frozenset[int] | None) -> None:
        """Leave pages to the next erasure."""
        self.left = None if left is None or self.left is None else self.left | left

    def check_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreError("This store was opened in another process. Open one of your own after the fork.")

    @property
    def searching(self) -> SearchThread:
        """Return the thread that searches. Its code is imported when it is first needed."""
        if self._searching is None:
            from perdure.stores.sqlite.search import SearchThread

            self._searching = SearchThread(self.path, self._sealing)
        return self._searching

    def look(self, job: Callable[[apsw.Connection], T]) -> T:
        """Read in the caller's thread: that takes a few microseconds, less than a hand-over to another thread."""
        return self._surely(partial(_in_one_state, job))

    def peek(self, sql: str, bindings: tuple[Any, ...]) -> Any:
        """Return the first row of one statement, or None."""
        return self._surely(_first_row, sql, bindings)

    def glimpse(self, load: Load, sealing: Sealing) -> Loaded | None:
        """Read a session with a short view in the caller's thread.

        Return None if another thread has to read it, or if something is wrong with it.
        """
        start = time.monotonic()
        if not self._patience.is_there(start):
            return None
        try:
            return self.look(partial(read_short, load, sealing))
        except (PerdureError, TypeError):  # the job reads it again, and reports what is wrong
            return None
        finally:
            self._patience.note(start, time.monotonic())

    def _surely(self, job: Callable[..., T], *given: Any) -> T:
        # The writer's connection first: its cache outlasts this process's commits, which empty the peeker's.
        borrowed = self.writer.borrow()
        if borrowed is not None:
            try:
                return _looked_at(borrowed, job, *given)
            finally:
                self.writer.give_back()
        with self._peeking:
            return _looked_at(self._peeker, job, *given)

    def _connected_again(self) -> apsw.Connection:
        """Return another connection for reading. Raise StoreError if the file was replaced after it was opened."""
        # Checked before and after, since the file may be replaced while the connection is made.
        self._surely(lambda db: None)
        connection = connect(self.path, reader=True)
        try:
            self._surely(lambda db: None)
        except BaseException:
            connection.close()
            raise
        return connection

    async def close(self) -> None:
        """End the threads, after what they were asked to do."""
        if self._pid != os.getpid():
            return  # the threads, the locks and the file's handles are the parent's
        if self._searching is not None:
            await self._searching.close()
        await self.readers.close()
        await self.writer.close()
        self._lock.close()  # after the writer, whose last batch still takes it
        with self._peeking:  # another event loop may be reading
            self._peeker.close()


def _looked_at(db: apsw.Connection, job: Callable[..., T], *given: Any) -> T:
    try:
        require_in_place(db)
        return job(db, *given)
    except (apsw.Error, UnicodeError) as error:
        raise as_store_error(error) from None


def _first_row(db: apsw.Connection, sql: str, bindings: tuple[Any, ...]) -> Any:
    return db.execute(sql, bindings).fetchone()


def _in_one_state(job: Callable[[apsw.Connection], T], db: apsw.Connection) -> T:
    db.execute("BEGIN")
    try:
        return job(db)
    finally:
        db.execute("ROLLBACK")


# The columns that hold texts. A damaged text may not be UTF-8, so it has to be read as bytes.
_TEXTS = {
    "session": {"id", "status", "agent", "owner", "parent"},
    "tag": {"tag"},
    "log": {"name"},
    "value": {"hash"},
    "uses": {"hash"},
    "blob": {"hash"},
    "attached": {"hash"},
    "run": {"loop"},
    "inbox": {"run", "kind"},
    "key": {"name", "digest"},
    "meta": {"key"},
    "timer": {"name"},
    "rate": {"name"},
    "token": {"digest", "id", "owner"},
}


class SqliteDialect(Dialect):
    """SQL for SQLite. A checksum that damage has turned into NULL is read as -1, which never matches."""

    # `+column` keeps SQLite from using the index of that column, which may be the damaged one.
    again = {
        "session": Again("session INDEXED BY session_again", {"id": "substr(id, -4) = substr(?, -4) AND +id = ?"}),
        "run": Again("run INDEXED BY run_by_session", {"loop": "+loop = ?"}),
        # This reads the index alone, which holds a copy of the name.
        "key": Again("key INDEXED BY key_again", {"name": "substr(name, -4) = substr(?, -4) AND name = ?"}),
    }

    backdated = "session INDEXED BY session_backdated"

    def by(self, index: str) -> str:
        return f" INDEXED BY {index}"

    def read(self, table: str, column: str) -> str:
        # The checksum of a message is compared with a number in any case, and there are many messages.
        return f"coalesce({column}, -1)" if column.endswith("crc") and table != "msg" else column

    def among(self, column: str) -> str:
        return f"{column} IN (SELECT value FROM json_each(?))"

    def ending(self, column: str) -> str:
        return f"substr({column}, -4) = substr(?, -4) AND substr({column}, -length(?)) = ?"

    def adapted_list(self, adapter: Adapter | None, values: Iterable[Any]) -> str:
        return msgspec.json.encode(list(values)).decode()


class _DamagedTexts(SqliteDialect):
    """The dialect for a damaged file: it reads texts as bytes, since they may not be UTF-8."""

    def read(self, table: str, column: str) -> str:
        is_text = column.rpartition(".")[2] in _TEXTS.get(table, ())
        return f"CAST({column} AS BLOB)" if is_text else super().read(table, column)


TRANSLATOR = Translator(SqliteDialect())
_OF_DAMAGED = Translator(_DamagedTexts())


def _drive(
    job: Callable[[], Job[T]],
    at: float,
    sealing: Sealing,
    db: apsw.Connection,
    deferred: DeferredRows | None = None,
) -> T:
    return drive(translated(job(), sealing), Rows(db, at, deferred).answer)


def _commit(change: Any, at: float, sealing: Sealing, deferred: DeferredRows, db: apsw.Connection) -> Any:
    """Make a change. One statement reads all about its session, which counts where many save at once."""

    def driven(job: Job[Any]) -> Any:
        if sealing.is_on:
            job = translated(job, sealing, Owner(change.owner))
        return drive(job, Rows(db, at, deferred).answer)

    row = db.execute(_FACTS, (str(change.session_id),)).fetchone()
    if row is None or type(row[-1]) is not int:  # a new session, or damage: the job looks closer
        return driven(change.job())
    *columns, recent, claim, expires, erasures = row
    facts = Facts(*columns, claim, claim is not None and expires > at, erasures, recent)  # type: ignore[call-arg]
    if isinstance(change, Keep) and not change.is_new:
        change.refuse(facts)
        draft = change.draft_of(facts)
        if change.is_plain(draft):
            _keep_plainly(change, draft, facts, _Written(db, deferred, sealing, change.owner))
            return change.made(draft, facts)
        return driven(change.kept_as(draft, facts))
    if isinstance(change, Append) and change.is_plain:
        change.refuse(facts)
        place = place_of(facts)
        _append_plainly(change, place, facts, at, _Written(db, deferred, sealing, change.owner))
        return change.made(place, (place.log, place.msg_end), facts)
    return driven(change.made_to(facts))


def _commit_all(
    together: KeepAll, at: float, sealing: Sealing, deferred: DeferredRows, db: apsw.Connection
) -> list[Any]:
    """Make several changes. If one is refused, the writer rolls back those before it."""
    return [_commit(keep, at, sealing, deferred, db) for keep in together.keeps]


_MESSAGES = "INSERT INTO msg (log, pos, crc, body) VALUES (?, ?, ?, ?)"
_HEADS = "INSERT INTO head (sid, version, crc, body) VALUES (?, ?, ?, ?)"
_BATCHES, _ = TRANSLATOR.insert(Insert("batch", BATCH_COLUMNS, []))
_RUN, _ = TRANSLATOR.insert(Insert("run", RUN_COLUMNS, [], or_set=RUN_GROWS))


def _keep_plainly(keep: Keep, draft: Draft, facts: Facts, rows: _Written) -> None:
    """Write the rows of an ordinary save with fixed SQL, without the translator."""
    place, batch = draft.place, keep.batch
    rows.change_session(place.sid, keep.columns(draft, facts, keep.known_listing))
    if batch is not None:
        rows.add_batch(place, batch, len(keep.messages))
    rows.add("msg", _MESSAGES, rows_of_messages(place.log, place.msg_end, keep.messages))
    rows.add("head", _HEADS, [row_of_head(place.sid, keep.version, draft.head)])


def _append_plainly(append: Append, place: Place, facts: Facts, at: float, rows: _Written) -> None:
    """Write the rows that a run writes ahead, and its claim, with fixed SQL, without the translator."""
    assert append.batch is not None
    columns = append.columns(place, facts)
    columns["expires"] = at + append.claim.lease
    rows.change_session(place.sid, columns)
    rows.add_batch(place, append.batch, len(append.messages))
    if append.messages:
        rows.add("msg", _MESSAGES, rows_of_messages(place.log, place.msg_end, append.messages))


class _Written:
    """A writer of rows with fixed SQL, for a connection inside a transaction."""

    __slots__ = ("_db", "_deferred", "_owner", "_sealing")

    def __init__(self, db: apsw.Connection, deferred: DeferredRows, sealing: Sealing, owner: str | None) -> None:
        self._db = db
        self._deferred = deferred
        self._sealing = sealing
        self._owner = owner

    def add(self, table: str, text: str, rows: Iterable[Row]) -> None:
        if self._sealing.is_on:
            rows = self._sealing.sealed_rows(table, self._owner, rows)
        if not self._deferred.take(text, rows):
            self._db.executemany(text, rows)

    def change_session(self, sid: int, columns: dict[str, Any]) -> None:
        self._db.execute(_update_of(tuple(columns)), (*columns.values(), sid))

    def add_batch(self, place: Place, batch: Batch, messages: int) -> None:
        """Record a batch whose entries are all of one run. It begins the run or extends it."""
        last, stretch = place.evt_end + batch.count, (place.log, place.msg_end, place.msg_end + messages)
        (row,) = rows_of_runs(place.sid, last, batch, stretch)
        number: Any = self._db.execute(_RUN, row).fetchone()
        self.add("batch", _BATCHES, [row_of_batch(place.sid, last, batch, number[0])])


@cache
def _update_of(columns: tuple[str, ...]) -> str:
    return f"UPDATE session SET {', '.join(f'{name} = ?' for name in columns)} WHERE sid = ?"


# Every save adds rows to these tables and changes none, so saves that share a commit write them together.
_DEFERRED = frozenset({"msg", "head", "batch"})


class Rows:
    """The tables of a connection, inside a transaction. `at` is the time by the caller's clock."""

    def __init__(self, db: apsw.Connection, at: float, deferred: DeferredRows | None = None) -> None:
        self._db = db
        self._at = at
        self._deferred = deferred

    def answer(self, statement: Statement) -> list[Any]:
        if isinstance(statement, Insert):
            return self._insert(statement)
        # The statement has to see the rows that were kept back.
        if self._deferred is not None and getattr(statement, "table", None) in _DEFERRED:
            self._deferred.write()
        match statement:
            case Select():
                return self._select(statement)
            case Update():
                self._db.execute(*TRANSLATOR.update(statement, self._at))
                return [(self._db.changes(),)]
            case Delete():
                self._db.execute(*TRANSLATOR.delete(statement))
            case Count():
                return self._counted(statement)
            case Clock():
                return [(self._at,)]
        return []

    def _select(self, statement: Select) -> list[Any]:
        rows = self._selected(statement)
        if rows and statement.limit is not None:
            _require_progress(statement, rows[-1])
        return rows

    def _selected(self, statement: Select) -> list[Any]:
        try:
            return self._db.execute(*TRANSLATOR.select(statement)).fetchall()
        except UnicodeDecodeError:  # one damaged text must not hide all other rows
            rows = self._db.execute(*_OF_DAMAGED.select(statement)).fetchall()
            texts = [column in _TEXTS[statement.table] for column in statement.columns]
            return [_decoded(row, texts) for row in rows]
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise as_store_error(error) from None  # raised inside the job, which may have another way to look

    def _counted(self, statement: Count) -> list[Any]:
        try:
            return self._db.execute(*TRANSLATOR.count(statement)).fetchall()
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise as_store_error(error) from None  # as for a Select

    def _insert(self, statement: Insert) -> list[Any]:
        text, rows = TRANSLATOR.insert(statement)
        if statement.table in _DEFERRED and self._deferred is not None and self._deferred.take(text, rows):
            return []
        if "RETURNING" not in text:
            self._db.executemany(text, rows)
            return []
        return [self._db.execute(text, row).fetchone() for row in rows][-1:]


def _require_progress(statement: Select, last: Row) -> None:
    """Raise CorruptRecord if a page of rows ends before it begins: a job that reads page by page would never end."""
    place = statement.where.get(f"{statement.order} >", statement.where.get(f"{statement.order} >="))
    if place is None or statement.order not in statement.columns:
        return
    reached = last[statement.columns.index(statement.order)]
    if reached < place or (reached == place and f"{statement.order} >" in statement.where):
        raise CorruptRecord(None, f"of the table {statement.table}", "its rows are out of order")


def _read_page(page: Page, db: apsw.Connection) -> list[HeaderRow]:
    try:
        rows = [HeaderRow(*row) for row in _in_steps(TRANSLATOR.page(page), db)]
    except UnicodeDecodeError:
        texts = [name in _TEXTS["session"] for name in HeaderRow._fields]
        rows = [HeaderRow(*_decoded(row, texts)) for row in _in_steps(_OF_DAMAGED.page(page), db)]
    # The next page begins where this one ends, by these two columns: out of order, it would skip or repeat rows.
    if any(newer[:2] <= older[:2] for newer, older in pairwise(rows)):
        raise CorruptRecord(None, "of the session table", "its rows are out of order")
    return rows


def _in_steps(steps: Steps, db: apsw.Connection) -> list[Row]:
    statement = next(steps)
    try:
        while True:
            statement = steps.send(db.execute(*statement).fetchall())
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here


def _decoded(row: Row, texts: Sequence[bool]) -> Row:
    return tuple(
        value.decode(errors="replace") if is_text and value is not None else value
        for value, is_text in zip(row, texts, strict=True)
    )
