"""Sessions in one SQLite file, which any number of processes may share."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Self, Unpack

import apsw

from perdure import codec
from perdure.aio import finish_despite_cancel
from perdure.errors import CorruptRecord, InvalidData, StoreError
from perdure.model.checks import expect_count, expect_wait
from perdure.model.definition import AgentDefinition
from perdure.model.ids import SessionId, now
from perdure.model.message import Message
from perdure.model.session import AgentSession, SessionInfoList
from perdure.model.transcript import LogRef
from perdure.protocols import (
    NOTHING_WRITTEN,
    Appended,
    ArchivedSession,
    Claim,
    Entry,
    Filters,
    JournalEntry,
    Key,
    Problem,
    RunOnRecord,
    SearchHit,
    SessionQuery,
    StoredAt,
    checked_version,
)
from perdure.stores import checked, sqlite_archive, sqlite_check, sqlite_tables
from perdure.stores import sqlite_erasure as erasure
from perdure.stores import sqlite_jobs as jobs
from perdure.stores import sqlite_journal as journal
from perdure.stores.beginnings import Beginning
from perdure.stores.cache import LRU, CachedSession, SessionCache
from perdure.stores.claims import Holder
from perdure.stores.file_lock import LOCK_TIMEOUT, FileLock
from perdure.stores.format.placement import Placement, consolidate, is_at_hand
from perdure.stores.format.rows import LAST, operation_id, page_start, prepare_batch, prepare_entries
from perdure.stores.format.tapes import TapeCache
from perdure.stores.redaction import Request
from perdure.stores.search import Query
from perdure.stores.sqlite_schema import connect, create_file, exclusively, migrate, prepare_directory
from perdure.stores.sqlite_scrub import scrub
from perdure.stores.sqlite_search import Erased, SearchThread
from perdure.stores.sqlite_wal import pages_in_log
from perdure.stores.worker import Worker, WritingWorker, as_store_error, require_in_place

# The tables whose rows move when sessions are saved, so that names may be left in pages that no erasure touches.
# All others are appended to, and their rows move in erasures only.
_NAMES = frozenset({"session", "tag", "log", "run", "key"})


class SqliteStore:
    """Keeps sessions in a SQLite file: durable to a power cut, one fsync for all the saves that wait together.

    `cache` is how many sessions are kept at hand; a cached session is checked against the file at every load.
    `lock_timeout` is how many seconds a writer waits for another process before it raises SessionLocked.
    """

    def __init__(self, path: str | os.PathLike[str], *, cache: int = 128, lock_timeout: float = LOCK_TIMEOUT) -> None:
        if not isinstance(path, str | os.PathLike) or str(path) in ("", ":memory:"):
            raise InvalidData("$.path", "a SqliteStore is a file; use MemoryStore() to keep sessions in memory")
        self._given = Path(path)
        self._timeout = expect_wait(lock_timeout, "$.lock_timeout")
        self._live = SessionCache(expect_count(cache, "$.cache"))
        self._definitions: LRU[str, AgentDefinition] = LRU(256)
        self._values: LRU[str, bytes] = LRU(256)
        self._open: _Open | None = None

    @property
    def is_open(self) -> bool:
        return self._open is not None

    async def __aenter__(self) -> Self:
        if self._open is not None:
            raise StoreError("This store is open already.")
        path = await asyncio.to_thread(_prepare, self._given, self._timeout)
        self._open = _Open(path, self._timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._open is not None:
            opened, self._open = self._open, None
            self._live.forget_all()
            await finish_despite_cancel(opened.close())

    @property
    def _db(self) -> _Open:
        if self._open is None:
            raise StoreError("This store is not open. Use it inside `async with SqliteStore(path) as store:`.")
        self._open.check_process()
        return self._open

    def pin(self, session_id: str) -> None:
        """Keep a session at hand, however long it is not used."""
        self._live.pinned.add(SessionId(session_id))

    def unpin(self, session_id: str) -> None:
        self._live.pinned.discard(SessionId(session_id))

    def evict(self, session_id: str) -> None:
        """Let go of a session that is at hand; the next load reads it again."""
        self._live.forget(SessionId(session_id))

    async def create(self, session: AgentSession, *, written: Mapping[str, StoredAt] = NOTHING_WRITTEN) -> AgentSession:
        checked.create(session, written)
        write = jobs.Write(
            session, Placement(session, self._db.origin, written), now(), operation_id(), self._db.origin
        )
        return await self._commit(partial(jobs.create, write=write))

    async def save(
        self,
        session: AgentSession,
        *,
        claim: Claim | None = None,
        written: Mapping[str, StoredAt] = NOTHING_WRITTEN,
        entries: Sequence[Entry] = (),
        taken: int = 0,
        key: Key | None = None,
    ) -> AgentSession:
        checked.save(session, claim, written, entries, taken, key)
        write = jobs.Write(
            session,
            Placement(session, self._db.origin, written),
            now(),
            operation_id(),
            self._db.origin,
            self._known(session),
            claim,
            prepare_batch(entries),
            taken,
            key,
        )
        return await self._commit(partial(jobs.save, write=write), claim)

    def _known(self, session: AgentSession) -> CachedSession | None:
        """What is cached of a session, if it is of the version to be replaced: only then has nothing changed since."""
        live = self._live.get(session.id)
        return live if live is not None and live.session.version == session.version else None

    async def _commit(self, job: Any, claim: Claim | None = None) -> AgentSession:
        live: CachedSession = await self._db.writer.run(job, partial(self._remember, self._db, claim))
        if not live.at_hand:
            with suppress(CorruptRecord):  # it is saved all the same
                return await self.load(live.session.id, live.session.version) or live.session
        return live.session

    def _remember(self, opened: _Open, claim: Claim | None, live: CachedSession) -> CachedSession:
        if claim is not None:
            opened.held.discard((claim.session_id, claim.epoch))
        session = consolidate(live.session)
        kept = CachedSession(session, live.erasures, live.hashes, live.refs, is_at_hand(session))
        self._live.keep(session.id, kept)
        return kept

    async def load(self, session_id: str, version: int | None = None) -> AgentSession | None:
        key = SessionId(session_id)
        version = checked_version(version)
        if version is not None and not 0 < version <= LAST:
            return None
        live = self._live.recall(key)
        newest = live is not None and version in (None, live.session.version) and self._is_current(key, live)
        if live is not None and newest and live.at_hand:
            return live.session
        known = live if live is not None and self._db.erasures() == live.erasures else None
        loaded, shelf = await self._read(key, version, known)
        if loaded is not None and known is not None and loaded.erasures != known.erasures:
            # Something was erased before the reader got to it: what is at hand may be what was erased.
            loaded, shelf = await self._read(key, version, None)
        if loaded is None:
            self._live.forget(key)
            return None
        session = self._assembled(loaded, shelf)
        if newest or version is None:
            self._live.keep(key, CachedSession(session, loaded.erasures, frozenset(loaded.values)))
        return session

    async def _read(
        self, key: str, version: int | None, known: CachedSession | None
    ) -> tuple[jobs.Loaded | None, TapeCache]:
        shelf = TapeCache(self._db.origin, None if known is None else known.session)
        cached = self._values.snapshot()
        job = partial(jobs.load, session_id=key, version=version, shelf=shelf, cached=cached)
        return await self._db.reader.run(job), shelf

    def _assembled(self, loaded: jobs.Loaded, shelf: TapeCache) -> AgentSession:
        for log, start, messages in loaded.fetched:
            shelf.put(log, start, messages)
        key = loaded.head.head.definition
        session = loaded.head.session(loaded.values, shelf.span, self._definitions.recall(key))
        self._definitions.keep(key, session.definition)
        self._values.keep(key, loaded.values[key])
        return session

    def _is_current(self, key: str, live: CachedSession) -> bool:
        return self._db.peek(key) == (live.session.version, live.erasures)

    async def exists(self, session_id: str) -> bool:
        return self._db.peek(SessionId(session_id)) is not None

    async def delete(self, session_id: str) -> None:
        key = SessionId(session_id)
        self._live.forget(key)
        self._values.forget_all()
        self._definitions.forget_all()
        indexed = self._db.searching.is_indexed
        job = partial(erasure.delete, session_id=key, at=now().timestamp(), indexed=indexed)
        erased: Erased
        erased, touched = await self._db.erase(job)
        await self._db.erase_everywhere(erased._replace(touched=touched))

    async def delete_many(self, session_ids: Iterable[str]) -> Sequence[SessionId]:
        """Erase sessions at the price of one, and say which; those that are being run, or gone already, are left."""
        keys, indexed = checked.session_ids(session_ids), self._db.searching.is_indexed
        self._live.forget_all()
        self._values.forget_all()
        self._definitions.forget_all()
        job = partial(erasure.delete_many, session_ids=keys, at=now().timestamp(), indexed=indexed)
        (done, erased), touched = await self._db.erase(job)
        if done:
            await self._db.erase_everywhere(erased._replace(touched=touched))
        return list(done)

    async def redact(self, session_id: str, message_ids: Sequence[str], *, replacement: str = "[redacted]") -> int:
        request = Request.of(session_id, message_ids, replacement)
        self._live.forget_all()
        self._values.forget_all()
        (replaced, erased), touched = await self._db.erase(partial(erasure.redact, request=request, at=now()))
        await self._db.erase_everywhere(erased._replace(touched=touched))
        return int(replaced)

    async def gc(self) -> int:
        erased: Erased = await self._db.writer.run(erasure.gc)
        # Though there be nothing to erase: a deletion may have been killed before it had removed its traces.
        await self._db.erase_everywhere(erased)
        return len(erased.changed)

    async def search(
        self, text: str, *, owner: str | None = None, session_id: str | None = None, limit: int = 20
    ) -> Sequence[SearchHit]:
        return await self._db.searching.search(Query.of(text, owner, session_id, limit))

    async def index(self, *, anew: bool = False, progress: Callable[[int, int], None] | None = None) -> int:
        checked.index(anew, progress)
        return await self._db.searching.index(anew=anew, progress=progress)

    async def list(self, **filters: Unpack[Filters]) -> SessionInfoList:
        query = SessionQuery.of(filters)
        page_start(query.after)
        page: SessionInfoList = await self._db.reader.run(partial(jobs.list_sessions, query=query))
        return page

    async def ids_with_prefix(
        self, prefix: str, *, owner: str | None = None, deleted: bool = False, limit: int = 50
    ) -> Sequence[SessionId]:
        sought = Beginning.of(prefix, owner, deleted, limit)
        found: Sequence[SessionId] = await self._db.reader.run(partial(jobs.ids_with_prefix, sought=sought))
        return found

    async def claim(
        self,
        session_id: str,
        *,
        version: int,
        owner: str,
        lease: float = 30.0,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        take_over: bool = False,
    ) -> tuple[Claim, Appended]:
        checked.claim(version, owner, lease, messages, entries, take_over)
        job = partial(
            journal.claim,
            session_id=SessionId(session_id),
            version=version,
            holder=Holder.here(owner),
            lease=lease,
            at=now().timestamp(),
            origin=self._db.origin,
            rows=_encoded(messages),
            batch=prepare_batch(entries),
            take_over=take_over,
        )
        taken: tuple[Claim, Appended] = await self._db.writer.run(job, self._db.note_claim)
        return taken

    async def heartbeat(self, claim: Claim) -> None:
        checked.held(claim)
        await self._db.writer.run(partial(journal.heartbeat, claim=claim, at=now().timestamp()))

    async def release(self, claim: Claim, *, interrupted: bool = False) -> None:
        checked.release(claim, interrupted)
        opened, held = self._db, (claim.session_id, claim.epoch)
        job = partial(journal.release, claim=claim, interrupted=interrupted)
        await opened.writer.run(job, lambda _: opened.held.discard(held))

    async def append(
        self,
        claim: Claim,
        *,
        messages: Sequence[Message] = (),
        entries: Sequence[Entry] = (),
        log: str = "",
        taken: int = 0,
    ) -> Appended:
        checked.append(claim, messages, entries, log, taken)
        job = partial(
            journal.append,
            claim=claim,
            at=now().timestamp(),
            origin=self._db.origin,
            log_name=log,
            rows=_encoded(messages),
            batch=prepare_batch(entries),
            taken=taken,
        )
        appended: Appended = await self._db.writer.run(job)
        return appended

    async def read(
        self,
        session_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        last: int | None = None,
        run: str | None = None,
        inbox: bool = False,
    ) -> Sequence[JournalEntry]:
        checked.read(after, limit, last, run, inbox)
        key = SessionId(session_id)
        if inbox:
            posted = await self._db.reader.run(partial(journal.read_inbox, session_id=key, after=after))
            return journal.cut(posted, limit, last, run)
        job = partial(journal.read_record, session_id=key, after=after, limit=limit, last=last, run=run)
        entries: Sequence[JournalEntry] = await self._db.reader.run(job)
        return entries

    async def runs(
        self, session_id: str, *, limit: int | None = None, before: int | None = None, run: str | None = None
    ) -> Sequence[RunOnRecord]:
        checked.runs(limit, before, run)
        key = SessionId(session_id)
        job = partial(journal.runs, session_id=key, origin=self._db.origin, limit=limit, before=before, run=run)
        found: Sequence[RunOnRecord] = await self._db.reader.run(job)
        return found

    async def log_of(self, session_id: str, name: str = "") -> tuple[LogRef, int]:
        checked.log_of(name)
        job = partial(journal.log_of, session_id=SessionId(session_id), name=name, origin=self._db.origin)
        found: tuple[LogRef, int] = await self._db.reader.run(job)
        return found

    async def lapsed(self) -> Sequence[SessionId]:
        found: Sequence[SessionId] = await self._db.reader.run(partial(journal.lapsed, at=now().timestamp()))
        return found

    async def messages(self, log: LogRef, start: int, stop: int) -> Sequence[Message]:
        checked.messages(log, start, stop, self._db.origin)
        job = partial(jobs.read_log, log=checked.log_number(log), start=start, stop=stop)
        messages: Sequence[Message] = await self._db.reader.run(job)
        return messages

    async def find_key(self, session_id: str, name: str) -> tuple[Key, int] | None:
        checked.find_key(name)
        found: tuple[Key, int] | None = await self._db.reader.run(
            partial(journal.find_key, session_id=SessionId(session_id), name=name)
        )
        return found

    async def is_claimed(self, session_id: str) -> bool:
        job = partial(journal.is_claimed, session_id=SessionId(session_id), at=now().timestamp())
        claimed: bool = await self._db.reader.run(job)
        return claimed

    async def is_interrupted(self, session_id: str) -> bool:
        return self._db.is_interrupted(SessionId(session_id))

    async def post(self, session_id: str, entry: Entry) -> int:
        checked.post(entry)
        (prepared,) = prepare_entries([entry])
        seq: int = await self._db.writer.run(partial(journal.post, session_id=SessionId(session_id), entry=prepared))
        return seq

    async def dump(self, session_id: str, *, alone: bool = False) -> ArchivedSession:
        checked.dump(alone)
        key, at, origin = SessionId(session_id), now().timestamp(), self._db.origin
        job = partial(sqlite_archive.dump, session_id=key, origin=origin, at=at, alone=alone)
        archived: ArchivedSession = await self._db.reader.run(job)
        return archived

    async def restore(self, archived: ArchivedSession) -> bool:
        checked.restore(archived)
        at, origin = now().timestamp(), self._db.origin
        job = partial(sqlite_archive.restore, archived=archived, origin=origin, at=at)
        is_new: bool = await self._db.writer.run(job)
        return is_new

    async def check(self) -> Sequence[Problem]:
        found: Sequence[Problem] = await self._db.reader.run(sqlite_check.check)
        return found


class _Open:
    """An open file: a writing thread, a reading thread, and a connection for looking at one row in passing."""

    def __init__(self, path: Path, lock_timeout: float) -> None:
        self._pid = os.getpid()
        self._path = path
        self.held: set[tuple[SessionId, int]] = set()
        """The sessions and epochs of the claims that were taken here and not given back yet."""
        self._peeking = threading.Lock()
        self._peeker = connect(path, reader=True)
        self.origin = str(self._look(partial(sqlite_tables.meta, key="uid")))
        self._lock = FileLock(lock_path(path), lock_timeout)
        self.writer = WritingWorker(f"perdure writer {path.name}", partial(connect, path), self._lock)
        self.reader = Worker(f"perdure reader {path.name}", partial(connect, path, reader=True))
        self.searching = SearchThread(path)

    async def erase(self, job: Callable[[apsw.Connection], Any]) -> tuple[Any, frozenset[int]]:
        """Erase something from the tables; return what the job returns, and the pages that were touched."""
        done: tuple[Any, frozenset[int]] = await self.writer.run(partial(self._erase, job), alone=True)
        return done

    def _erase(self, job: Callable[[apsw.Connection], Any], connection: apsw.Connection) -> tuple[Any, frozenset[int]]:
        require_in_place(connection)
        with exclusively(connection):
            done = job(connection)
        # Before the lock is let go: the next to write may begin the log again.
        return done, pages_in_log(self._path, connection.pragma("page_size"))

    async def erase_everywhere(self, erased: Erased) -> None:
        """Leave nothing of what has been erased from the tables: not in the file, nor in the search index."""
        tables = None if erased.touched is None else _NAMES
        job = partial(self._leave_no_trace, erased.touched or (), tables)
        counted, more = await self.writer.run(job, alone=True)
        while more is not None:  # others write in between
            more = await self.writer.run(partial(self._scrub, (), tables, more), alone=True)
        await self.searching.erase(erased.counted_up_to(counted))

    def _leave_no_trace(
        self, touched: Collection[int], tables: Collection[str] | None, db: apsw.Connection
    ) -> tuple[int, int | None]:
        """Overwrite what has been deleted, where it stood; return the number of erasures, of which this is one."""
        more = self._scrub(touched, tables, 1, db, counts=True)
        return int(sqlite_tables.meta(db, "erasures")), more

    def _scrub(
        self,
        touched: Collection[int],
        tables: Collection[str] | None,
        start: int,
        _: apsw.Connection,
        *,
        counts: bool = False,
    ) -> int | None:
        """Scrub some pages, see `sqlite_scrub`, which needs its own connection."""
        connection = connect(self._path)
        try:
            jobs.checkpoint(connection)
            with exclusively(connection):
                more = scrub(connection, self._path, touched=touched, tables=tables, start=start)
                jobs.count_erasure(connection, by=int(counts))
            jobs.checkpoint(connection)
            return more
        finally:
            connection.close()

    def check_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreError("This store was opened in another process. Open one of your own after the fork.")

    def peek(self, session_id: str) -> tuple[int, int] | None:
        """Version and erasures, read at once: a few microseconds, less than handing it to a thread."""
        found: tuple[int, int] | None = self._look(partial(jobs.peek, session_id=session_id))
        return found

    def is_interrupted(self, session_id: str) -> bool:
        """Read at once, too: every action asks."""
        job = partial(journal.is_interrupted, session_id=session_id, at=now().timestamp())
        return bool(self._look(job))

    def erasures(self) -> int:
        return int(self._look(partial(sqlite_tables.meta, key="erasures")))

    def _look(self, job: Callable[[apsw.Connection], Any]) -> Any:
        try:
            with self._peeking:
                require_in_place(self._peeker)
                return job(self._peeker)
        except (apsw.Error, UnicodeError) as error:
            raise as_store_error(error) from None

    def note_claim(self, taken: tuple[Claim, Appended]) -> tuple[Claim, Appended]:
        self.held.add((taken[0].session_id, taken[0].epoch))
        return taken

    async def close(self) -> None:
        """End the threads. Runs that go on can write no more, so their claims lapse at once, to be recovered."""
        if self._pid != os.getpid():
            return  # the threads, the locks and the file's handles are the parent's
        await self.searching.close()
        await self.reader.close()
        await self.writer.close(self._lapse_claims if self.held else None)
        self._lock.close()
        with self._peeking:  # another event loop may be looking
            self._peeker.close()

    def _lapse_claims(self, db: apsw.Connection) -> None:
        journal.lapse(db, self.held)


def lock_path(path: Path) -> Path:
    return path.with_name(path.name + "-lock")


def _prepare(given: Path, lock_timeout: float) -> Path:
    path = prepare_directory(given)
    lock = FileLock(lock_path(path), lock_timeout)
    try:
        with lock:
            create_file(path)
            connection = connect(path)
            try:
                migrate(connection)
            finally:
                connection.close()
    except apsw.Error as error:
        raise StoreError(f"{path} cannot be opened as a SQLite database: {error}") from None
    finally:
        lock.close()
    return path


def _encoded(messages: Sequence[Message]) -> list[tuple[str, bytes]]:
    return [(message.id, codec.encode_message(message)) for message in messages]
