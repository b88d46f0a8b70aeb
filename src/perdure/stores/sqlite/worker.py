"""A thread that owns one SQLite connection and serves jobs from any event loop.

A writing worker commits all waiting jobs together: a single save is committed at once, and many share one fsync. A
cancelled caller does not cancel its job: what was handed in is carried out. With `commit_in_loop`, an event loop
commits brief jobs itself while no other process is writing.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import apsw

from perdure.errors import CorruptRecord, InvalidData, InvalidSessionId, PerdureError, SessionLocked, StoreError
from perdure.stores.file_lock import FileLock
from perdure.stores.lock_holder import locked_error
from perdure.stores.sqlite import schema
from perdure.stores.sqlite.deferred import DeferredRows
from perdure.stores.sqlite.marks import Marker

T = TypeVar("T")
Job = Callable[[apsw.Connection], Any]
Finish = Callable[[Any], Any]

MOST_PER_COMMIT = 256
_NOT_CONNECTED = (apsw.Error, OSError, PerdureError)
# Commits wait in the write-ahead log, where one bad frame hides all after it. So an idle writer empties the log.
IDLE_SECONDS = 1.0


class Request:
    """A job, and the event loop that waits for its result."""

    __slots__ = ("alone", "brief", "error", "finish", "future", "job", "long", "loop", "result")

    def __init__(
        self,
        job: Job,
        finish: Finish | None,
        loop: asyncio.AbstractEventLoop,
        *,
        alone: bool = False,
        brief: bool = False,
        long: bool = False,
    ) -> None:
        self.alone = alone
        self.brief = brief
        self.long = long
        self.job = job
        self.finish = finish
        self.loop = loop
        self.future: asyncio.Future[Any] = loop.create_future()
        self.result: Any = None
        self.error: BaseException | None = None

    def deliver(self) -> None:
        """Give the result to the caller, in its loop. `finish` runs even if the caller is gone: the job is done."""
        if self.error is None and self.finish is not None:
            try:
                self.result = self.finish(self.result)
            except Exception as error:  # around a request: the caller has to be told, whatever it is
                self.error = error
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Requests:
    """A desk for jobs from any event loop. The jobs that a loop's tasks hand in within one turn go together."""

    def __init__(self) -> None:
        self._gathering: dict[asyncio.AbstractEventLoop, list[Request]] = {}
        self._pid = os.getpid()
        self._closed = False
        self._is_ended = False

    async def run(self, job: Callable[[apsw.Connection], T], *, alone: bool = False, long: bool = False) -> Any:
        """Return what the job returns, or raise the error it raised.

        A job with `alone` gets the connection outside of any transaction.
        """
        return await self.ask(job, alone=alone, long=long)

    def ask(
        self,
        job: Callable[[apsw.Connection], T],
        finish: Callable[[T], Any] | None = None,
        *,
        alone: bool = False,
        brief: bool = False,
        long: bool = False,
    ) -> asyncio.Future[Any]:
        """Hand in a job. Return a future of its result, which is passed through `finish` in this loop.

        A `brief` job may be carried out in this loop's thread.
        """
        if self._closed:
            raise _closed_error()
        if self._pid != os.getpid():
            raise StoreError("This store was opened in another process. Open one of your own after the fork.")
        loop = asyncio.get_running_loop()
        request = Request(job, finish, loop, alone=alone, brief=brief, long=long)
        gathered = self._gathering.get(loop)
        if gathered is None:
            self._gathering[loop] = [request]
            loop.call_soon(self._hand_over, loop)
        else:
            gathered.append(request)
        return request.future

    def _hand_over(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand over what was gathered.

        If each job were handed over by itself, the first would wake a thread, which would compete for the GIL.
        """
        requests = self._gathering.pop(loop)
        if not self._accept(requests):
            for request in requests:  # another loop has closed the store meanwhile: no thread would answer
                request.error = _closed_error()
                request.deliver()

    def _accept(self, requests: list[Request]) -> bool:
        """Take over requests. Return False if the worker has ended."""
        raise NotImplementedError


class Worker(Requests):
    """A thread with a connection. `run` hands it a job and waits for the result."""

    def __init__(self, name: str, connect: Callable[[], apsw.Connection]) -> None:
        super().__init__()
        self._connect = connect
        self._queue: queue.SimpleQueue[list[Request] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._ending = threading.Lock()
        self._broken: BaseException | None = None
        self._waiting: list[Request] = []
        """Requests that were taken from the queue before there was a connection."""
        self._thread.start()

    def _accept(self, requests: list[Request]) -> bool:
        # Under the lock: a request behind the None that ends the queue would never be answered.
        with self._ending:
            if self._is_ended:
                return False
            self._queue.put(requests)
            return True

    async def close(self, last: Job | None = None) -> None:
        """Carry out what is waiting, then a last job if that is possible, and end the thread."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        await asyncio.sleep(0)  # what was gathered in this turn of the loop is handed over first
        loop = asyncio.get_running_loop()
        final = [] if last is None else [Request(last, None, loop)]
        with self._ending:
            self._is_ended = True
            self._queue.put(final)
            self._queue.put(None)
        await joined(self._thread)
        for request in final:
            if not request.future.cancel():
                request.future.exception()  # read, or asyncio would log it; the store is closed in any case

    def _serve(self) -> None:
        connection = self._connected()
        if connection is None:
            return
        self._begin(connection)
        while self._serve_batch(connection):
            pass
        self._end(connection)

    def _connected(self) -> apsw.Connection | None:
        """Open the connection. If that fails, try again for each request. Return None if the worker is closed first.

        After a failed sync it is not tried again.
        """
        with suppress(*_NOT_CONNECTED):
            return self._connect_once()
        while (requests := self._queue.get()) is not None:
            try:
                connection = self._connect_once()
            except _NOT_CONNECTED as error:
                for request in requests:
                    request.error = as_store_error(error)
                self._done(requests)
            else:
                self._waiting = requests
                return connection
        return None

    def _connect_once(self) -> apsw.Connection:
        if self._broken is not None:
            raise self._broken
        try:
            return self._connect()
        except schema.SyncFailed as error:
            self._broken = error
            raise

    def _begin(self, connection: apsw.Connection) -> None:
        """Do what has to come before the first batch. This is called once."""

    def _end(self, connection: apsw.Connection) -> None:
        connection.close()

    def _serve_batch(self, connection: apsw.Connection) -> bool:
        """Carry out what is waiting. Return False if nothing more can come.

        This is a function of its own so that nothing of a batch stays in memory while the next one is waited for.
        """
        batch, open_for_more = self._next_batch(connection)
        together = [request for request in batch if not request.alone]
        if together:
            self._carry_out(connection, together)
            self._done(together)
        for request in batch:
            if request.alone:
                self._carry_out_alone(connection, request)
                self._done([request])
        return open_for_more

    def _done(self, batch: list[Request]) -> None:
        deliver(batch)

    def _next_batch(self, connection: apsw.Connection) -> tuple[list[Request], bool]:
        batch, self._waiting = self._waiting, []
        requests: list[Request] | None = [] if batch else self._wait(connection)
        while requests is not None:
            batch += requests
            if len(batch) >= MOST_PER_COMMIT:
                return batch, True
            try:
                requests = self._queue.get_nowait()
            except queue.Empty:
                return batch, True
        return batch, False

    def _wait(self, connection: apsw.Connection) -> list[Request] | None:
        return self._queue.get()

    def _carry_out(self, connection: apsw.Connection, batch: list[Request]) -> None:
        for request in batch:
            read(connection, request)

    def _carry_out_alone(self, connection: apsw.Connection, request: Request) -> None:
        read_alone(connection, request)


def read(connection: apsw.Connection, request: Request) -> None:
    """Carry out a request that reads, in one snapshot of the file."""
    try:
        require_in_place(connection)
        connection.execute("BEGIN")
        request.result = request.job(connection)
    except TypeError as error:  # the tables are strict: a column that is read as another type is damaged
        request.error = CorruptRecord(None, "of the database file", f"a column has changed its type ({error})")
        request.error.__cause__ = error
    except InvalidSessionId as error:  # callers' ids were checked before, so this one is from a damaged row
        request.error = CorruptRecord(None, "of the session table", str(error))
    except Exception as error:  # around a request: the thread serves others after it
        request.error = as_store_error(error)
    finally:
        _roll_back(connection)


def read_alone(connection: apsw.Connection, request: Request) -> None:
    """Carry out a request that begins its transactions itself."""
    try:
        request.result = request.job(connection)
    except Exception as error:  # around a request: the thread serves others after it
        request.error = as_store_error(error)


class WritingWorker(Worker):
    """A worker that commits in groups, one process at a time.

    SQLite's own busy handler is unfair between processes; a lock on a file beside the database is fair.

    With `in_loop`, an event loop commits brief jobs in its own thread. It then waits for the disk, but never for a
    lock. All that could hold it up longer is left to the worker's thread.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], apsw.Connection],
        lock: FileLock,
        deferred: DeferredRows,
        *,
        in_loop: bool = False,
    ) -> None:
        self._lock = lock
        self._deferred = deferred
        self._is_behind = False
        self._logged = 0
        """The pages in the write-ahead log after the last commit; 0 if they need not be looked at again."""
        self._committed = 0
        """The pages in it after the commit under way; 0 before that, or if nothing was written."""
        self._marker: Marker | None = None
        self._is_for_loops = in_loop
        self._using = threading.Lock()
        """Held by the thread that uses the connection, and taken before the lock on the file."""
        self._connection: apsw.Connection | None = None
        """The connection, while it is open."""
        self._left = 0
        """The number of requests left to the worker's thread. No loop goes before them, or they might never run."""
        super().__init__(name, connect)

    def _begin(self, connection: apsw.Connection) -> None:
        self._marker = Marker(Path(connection.filename), connection.pragma("page_size"))
        # This hook replaces SQLite's own checkpoint, which would be part of a commit in an event loop.
        connection.set_wal_hook(self._note_pages)
        self._connection = connection

    def _end(self, connection: apsw.Connection) -> None:
        # A loop that has borrowed the connection gives it back first, and none borrows it afterwards.
        with self._using:
            self._connection = None
            super()._end(connection)
            if self._marker is not None:
                self._marker.close()

    def borrow(self) -> apsw.Connection | None:
        """Return the connection for a short read, unless it is in use or wanted. `give_back` has to follow.

        Its cache holds what this process has written. The caches of other connections are emptied by each commit.
        """
        if self._left or self._broken is not None or not self._using.acquire(blocking=False):
            return None
        connection = self._connection
        if connection is None:
            self._using.release()
        return connection

    def give_back(self) -> None:
        self._using.release()

    def _note_pages(self, _: apsw.Connection, __: str, pages: int) -> int:
        self._logged = self._committed = pages
        return apsw.SQLITE_OK

    def _mark(self) -> None:
        """Mark the commit that has just returned, if it has written anything. The lock is still held."""
        if self._committed and self._marker is not None:
            self._marker.set(self._committed)

    def _accept(self, requests: list[Request]) -> bool:
        if self._is_for_loops and self._carry_out_in_loop(requests):
            return True
        with self._ending:
            self._left += len(requests)
        return super()._accept(requests)

    def _done(self, batch: list[Request]) -> None:
        with self._ending:
            self._left -= len(batch)
        super()._done(batch)

    def _carry_out_in_loop(self, batch: list[Request]) -> bool:
        """Carry out a batch in this thread, which is an event loop's. Return False if that could hold the loop up."""
        if len(batch) > MOST_PER_COMMIT or not all(request.brief for request in batch):
            return False
        # `_using` before the file's lock, in the order of the worker's thread; and neither is waited for here.
        if self._left or not self._using.acquire(blocking=False):
            return False
        try:
            connection = self._connection
            if connection is None or self._is_ended or self._broken is not None or not self._lock.try_once():
                return False
            try:
                if not _begin_at_once(connection):
                    return False
                self._commit_or_fail(connection, batch)
            finally:
                self._lock.let_go()
            if not self._is_behind or self._logged >= schema.CHECKPOINT_PAGES:
                self._is_behind = True
                self._queue.put([])  # the worker's thread empties the log: now if it is long, else when it is idle
        finally:
            self._using.release()
        _deliver_in_loop(batch)
        return True

    def _commit_or_fail(self, connection: apsw.Connection, batch: list[Request]) -> None:
        try:
            self._commit(connection, batch)
        except Exception as error:  # around a request: without an answer its callers would wait for ever
            self._fail_all(connection, batch, error)
        except BaseException:  # Ctrl-C, before the commit was done
            _roll_back(connection)
            raise

    def _wait(self, connection: apsw.Connection) -> list[Request] | None:
        if self._logged >= schema.CHECKPOINT_PAGES:
            self._empty_log(connection)
        if self._is_behind:
            try:
                return self._queue.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                self._empty_log(connection)
        return self._queue.get()

    def _empty_log(self, connection: apsw.Connection) -> None:
        """Move what was committed into the database file, unless another process is writing: that one will do it."""
        with self._using:
            self._logged = 0
            if self._lock.try_once():
                try:
                    self._is_behind = not self._move_into_file(connection)
                finally:
                    self._lock.let_go()

    def _move_into_file(self, connection: apsw.Connection) -> bool:
        """Move what was committed into the database file. Return whether that could be tried."""
        self._logged = 0
        try:
            # PASSIVE neither waits for readers nor keeps them out.
            connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except apsw.Error:  # what cannot be moved stays in the log, where it is as durable
            return False
        return True

    def _carry_out(self, connection: apsw.Connection, batch: list[Request]) -> None:
        if self._broken is not None:
            for request in batch:
                request.error = self._broken
            return
        with self._using:
            try:
                with self._lock:
                    require_in_place(connection)
                    connection.execute("BEGIN IMMEDIATE")
                    self._commit(connection, batch)
                    if self._logged >= schema.CHECKPOINT_PAGES and not self._is_for_loops:
                        self._move_into_file(connection)
                self._is_behind = True
            except Exception as error:  # around a request: without an answer its callers would wait for ever
                self._fail_all(connection, batch, error)

    def _commit(self, connection: apsw.Connection, batch: list[Request]) -> None:
        """Carry out a batch in the transaction that has begun, and commit it."""
        if not self._done_together(connection, batch):
            # Begun again without the jobs' traces. Each then has a savepoint of its own.
            connection.execute("ROLLBACK")
            connection.execute("BEGIN IMMEDIATE")
            for request in batch:
                self._try_one(connection, request)
        self._committed = 0
        connection.execute("COMMIT")
        # Only now, and under the lock: the mark never claims a commit that is not on the disk.
        self._mark()

    def _carry_out_alone(self, connection: apsw.Connection, request: Request) -> None:
        if self._broken is not None:
            request.error = self._broken
            return
        with self._using:
            try:
                with self._lock:
                    request.result = request.job(connection)
                    # The job may have committed with a connection of its own, which the hook does not see.
                    self._committed = max(connection.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_NOOP)[0], 0)
                    self._mark()
                self._is_behind = True
            except Exception as error:  # around a request: the thread serves others after it
                self._fail_all(connection, [request], error)

    def _done_together(self, connection: apsw.Connection, batch: list[Request]) -> bool:
        """Carry out a batch without savepoints, which most do not need, and write the rows of all jobs at once.

        Return False if a job failed after it had begun to write: only a savepoint can separate it from the others.
        """
        with self._deferred.gathering(connection) as rows:
            for request in batch:
                before = connection.total_changes(), rows.count
                try:
                    request.result = request.job(connection)
                except (apsw.FullError, apsw.IOError):  # the disk failed, not this job: the whole batch fails
                    raise
                except Exception as error:  # around a request: the others in its commit must not fail with it
                    if (connection.total_changes(), rows.count) != before:
                        return False
                    request.error = as_store_error(error)
            try:
                rows.write()
            except (apsw.FullError, apsw.IOError):
                raise
            except apsw.Error:  # with savepoints it shows whose row it is
                return False
        return True

    def _try_one(self, connection: apsw.Connection, request: Request) -> None:
        request.error = None
        connection.execute("SAVEPOINT one")
        try:
            request.result = request.job(connection)
        except (apsw.FullError, apsw.IOError):
            raise
        except Exception as error:  # around a request: the others in its commit must not fail with it
            request.error = as_store_error(error)
            connection.execute("ROLLBACK TO one")
        connection.execute("RELEASE one")

    def _fail_all(self, connection: apsw.Connection, batch: list[Request], error: BaseException) -> None:
        _roll_back(connection)
        failure = busy_error(Path(connection.filename)) if isinstance(error, apsw.BusyError) else as_store_error(error)
        if isinstance(error, apsw.IOError):
            failure = self.refuse_more(error)
        for request in batch:
            request.error = request.error or failure

    def refuse_more(self, error: BaseException) -> StoreError:
        """Refuse all further writes, since the disk has failed. Return the error that callers get.

        After a failed fsync the kernel may have dropped the data: no later success can be trusted.
        """
        self._broken = StoreError(
            f"This store failed to write ({error}) and refuses more. Check the disk, then reopen it."
        )
        return self._broken


class DiskFailed(StoreError):
    """The error for a failed read, write or sync. `error` is SQLite's own."""

    def __init__(self, error: apsw.Error) -> None:
        self.error = error
        super().__init__(f"SQLite failed to read or to write ({error}). Check the disk, then repeat this.")


def _begin_at_once(connection: apsw.Connection) -> bool:
    """Begin a transaction that writes, without waiting. Return False if another has the lock, or something is wrong."""
    connection.set_busy_timeout(0)
    try:
        require_in_place(connection)
        connection.execute("BEGIN IMMEDIATE")
    except (apsw.Error, StoreError):  # the worker's thread waits, or finds the same and says so
        return False
    finally:
        connection.set_busy_timeout(schema.BUSY_MS)
    return True


async def joined(thread: threading.Thread) -> None:
    """Wait until a thread has ended. A new thread waits for it, since tools may keep the executor's threads busy."""
    ended = asyncio.get_running_loop().create_future()
    loop = ended.get_loop()

    def wait() -> None:
        thread.join()
        with suppress(RuntimeError):  # the loop has been closed meanwhile
            loop.call_soon_threadsafe(ended.cancel)

    try:
        threading.Thread(target=wait, name=f"{thread.name} closing", daemon=True).start()
    except RuntimeError:  # the interpreter is about to exit, and starts no more threads
        thread.join()
    else:
        await asyncio.wait({ended})


def _closed_error() -> StoreError:
    return StoreError("This store is closed. Open it with `async with`, and keep the block open while it is used.")


def require_in_place(connection: apsw.Connection) -> None:
    """Raise StoreError if the file of a connection has been removed, renamed or replaced."""
    moved = array("i", [0])
    connection.file_control("main", apsw.SQLITE_FCNTL_HAS_MOVED, moved.buffer_info()[0])
    if moved[0]:
        raise StoreError(
            f"The file {connection.filename} has been removed, renamed or replaced since this store was opened. "
            "Nothing was read or written. Put it back if you need it; then close this store and open it again."
        )


def _roll_back(connection: apsw.Connection) -> None:
    with suppress(apsw.Error):  # nothing has to be kept, and the next BEGIN reports what is wrong
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def deliver(batch: list[Request]) -> None:
    """Wake each event loop once, however many requests it has."""
    loops = {request.loop for request in batch}
    for loop in loops:
        requests = batch if len(loops) == 1 else [request for request in batch if request.loop is loop]
        with suppress(RuntimeError):  # the loop has been closed, so none of its tasks is waiting
            loop.call_soon_threadsafe(_deliver_in_loop, requests)


def _deliver_in_loop(requests: list[Request]) -> None:
    for request in requests:
        request.deliver()


def busy_error(path: Path) -> SessionLocked:
    """Return the error for a file that is locked by a process that does not use our lock, such as `sqlite3`."""
    beside = [path.with_name(path.name + end) for end in ("-shm", "-wal")]
    return locked_error(None, path, schema.BUSY_MS / 1000, beside)


def as_store_error(error: BaseException) -> BaseException:
    """Return an error of SQLite or the system as one of perdure's, and any other error unchanged."""
    if isinstance(error, UnicodeDecodeError):
        return CorruptRecord(None, "of the database file", str(error))
    if isinstance(error, UnicodeEncodeError):
        return InvalidData("$", "a text holds half of a surrogate pair, which UTF-8 cannot carry")
    if not isinstance(error, apsw.Error | OSError):
        return error
    if isinstance(error, apsw.CorruptError | apsw.NotADBError):
        return CorruptRecord(None, "of the database file", str(error))
    if isinstance(error, apsw.FullError):
        return StoreError("The disk is full. Nothing of this save was kept; free some space and repeat it.")
    if isinstance(error, apsw.ReadOnlyError):
        return StoreError(
            f"The store's files may not be written ({error}). Nothing was kept. Check their permissions and the file "
            "system; then close this store and open it again."
        )
    if isinstance(error, apsw.IOError):
        return DiskFailed(error)
    return StoreError(f"SQLite failed: {error}")
