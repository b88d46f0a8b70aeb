"""Connections to the server that are renewed when lost, transactions that happen once, and the meaning of errors.

A stopped client or a dead connection does not block others. The server ends a transaction whose client falls silent.
The client closes a connection on which the server falls silent.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import conninfo, sql
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from perdure.aio import aside
from perdure.errors import ConfigurationError, CorruptRecord, InvalidData, PerdureError, StoreError
from perdure.stores.engine import Interfered

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]
Queries = Generator[tuple[str, Any], list[Any], T]
"""Statements with their values, one after the other. Each is answered with its rows, or with their number."""

PATIENCE = 30.0
"""The seconds to wait for a lost server, and the seconds that one may be silent before it counts as lost."""
_PATIENCE_WITH_JOBS = 600.0
"""The same for a job of many statements, each of which may read a whole table before it answers."""
# In milliseconds. The limit for a lock is the longer one, so that a wait for a stopped client's lock succeeds.
LIMITS = {"idle_in_transaction_session_timeout": 10_000, "lock_timeout": 20_000}
# A job computes between its statements, so its transaction may be idle for longer.
_LIMITS_OF_JOBS = {"idle_in_transaction_session_timeout": 60_000, "lock_timeout": 20_000}
_DSN_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}
# Plans are made once, for tables that may be empty at that time. Later they still have to find rows by an index.
_SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    # Before version 18 a plan with what is off above costs so much on paper that each statement would be compiled
    # first, which takes seconds.
    "jit": "off",
    "client_min_messages": "warning",
}
_OPTIONS: dict[str, Any] = {"autocommit": True, "prepare_threshold": 0}
_PAUSE = 0.05
_LEAST_TRIES = 10
# If a row is there already, the next look finds the one that was added at the same time. Further tries add nothing.
_MOST_TRIES_OF_A_KEY = 3
_MOST_SPARE = 2


class Link:
    """Connections to one schema of one database, for one process and one event loop."""

    def __init__(self, dsn: str, schema: str, most: int) -> None:
        self.schema = schema
        self.channel = f"perdure {schema}"[:63]
        self._dsn = completed_dsn(dsn, fallback_application_name=self.channel)
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self._made: WeakSet[Any] = WeakSet()
        self._trusted: WeakSet[Connection] = WeakSet()
        self._spare: list[ImpatientJob] = []
        # One connection at least is left to the pool.
        kept = min(most - 1, 3)
        self.looking = Line(self, is_kept=kept > 1)
        self.writing = [Line(self, is_kept=kept > 0), *([Line(self, is_kept=True)] if kept > 2 else [])]
        """The lines for batches: two, if there are connections to spare."""
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._dsn,
            connection_class=Impatient,
            open=False,
            min_size=1,
            max_size=most - kept,
            kwargs=_OPTIONS,
            configure=self._configure,
            timeout=PATIENCE,
            name=f"perdure {schema}",
        )

    async def open(self) -> None:
        try:
            await self._pool.open(wait=True, timeout=PATIENCE)
            for line in (*self.writing, self.looking):
                await line.open()
        except (PoolTimeout, psycopg.Error) as error:
            raise StoreError(
                f"No connection to PostgreSQL: {str(error).rstrip('.? ')}. Check the DSN and that the server runs."
            ) from None

    async def close(self) -> None:
        self.closed = True
        self._drop_spare()
        for line in (*self.writing, self.looking):
            await line.close()
        await self._pool.close()

    @property
    def is_abandoned(self) -> bool:
        """True if the process or the event loop that opened it cannot close it any more."""
        return self._pid != os.getpid() or self._loop.is_closed()

    def abandon(self) -> None:
        """Drop the connections without a message to the server: a forked child shares them with its parent."""
        self.closed = True
        # In a forked child even closing them would end the parent's sessions at the server.
        if self._pid == os.getpid():
            for connection in list(self._made):
                connection.pgconn.finish()

    def check(self) -> None:
        if self.closed:
            raise StoreError(
                "This store is closed. Open it with `async with`, and keep the block open while it is used."
            )
        if self._pid != os.getpid():
            raise StoreError("This store was opened in another process. Open one of your own after the fork.")
        if self._loop is not asyncio.get_running_loop():
            raise StoreError("This store was opened in another event loop. Open one in each loop that uses it.")

    async def connect(self, kind: type[Connection] = psycopg.AsyncConnection) -> Connection:
        """Return a connection outside of the pool. The caller closes it."""
        connection = await kind.connect(self._dsn, **_OPTIONS)
        try:
            await self._configure(connection)
        except BaseException:  # the caller was cancelled, or the server is lost
            await connection.close()
            raise
        return connection

    async def _configure(self, connection: Connection) -> None:
        self._made.add(connection)
        await connection.execute(self._setup(LIMITS), prepare=False)
        self._trusted.add(connection)

    def _setup(self, limits: dict[str, int]) -> sql.Composed:
        settings = [sql.SQL("SET {} = {}").format(sql.Identifier(k), sql.Literal(v)) for k, v in _SETTINGS.items()]
        path = sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema))
        return sql.SQL("; ").join([*settings, *limiting(self._dsn, limits), path])

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Yield a connection of the pool.

        Before Python 3.12 the pool's wait swallows a cancellation that comes at the same moment as the connection. A
        caller that waits for the cancelled task would wait for ever, so the cancellation is looked for here.
        """
        self.check()
        task = asyncio.current_task()
        assert task is not None
        wishes = task.cancelling()
        async with self._trusted_connection() as connection:
            if task.cancelling() > wishes:
                raise asyncio.CancelledError
            yield connection

    @asynccontextmanager
    async def _trusted_connection(self) -> AsyncIterator[Connection]:
        """Yield a connection that was made since the last one was lost: if one is cut, the others may be cut too."""
        while True:
            async with self._pool.connection() as connection:
                if connection not in self._trusted:
                    await connection.close()  # the pool makes another for it
                    continue
                try:
                    yield connection
                finally:
                    self.look_at(connection)
                return

    def is_trusted(self, connection: Connection) -> bool:
        """Tell whether a connection was made since the last one was lost."""
        return connection in self._trusted

    def look_at(self, connection: Connection) -> None:
        """Stop trusting the other connections too, if this one was lost."""
        if connection.closed:
            self._trusted.clear()
            self._drop_spare()

    @contextmanager
    def _job_connection(self) -> Iterator[psycopg.Connection[Any]]:
        """Yield a connection for a thread. A spare one serves the next job, since making one takes long."""
        connection = self._spare.pop() if self._spare else self._connect_for_job()
        try:
            yield connection
        finally:
            if self.closed or connection.closed or len(self._spare) >= _MOST_SPARE:
                connection.close()
            else:
                self._spare.append(connection)

    def _connect_for_job(self) -> ImpatientJob:
        connection = ImpatientJob.connect(self._dsn, autocommit=True)
        self._made.add(connection)
        connection.execute(self._setup(_LIMITS_OF_JOBS), prepare=False)
        return connection

    def _drop_spare(self) -> None:
        while self._spare:
            self._spare.pop().close()

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Run work that only reads on a connection. Repeat it while the server is lost, or others' locks hold it up."""

        async def attempt() -> T:
            async with self.connection() as connection:
                return await work(connection)

        return await self.patiently(attempt)

    async def transact(self, work: Callable[[], Queries[T]], *, snapshot: bool = False) -> T:
        """Run work in one transaction, once. With `snapshot` it reads the database as it was when it began."""
        transaction = _Transaction(work, snapshot)

        async def once(connection: Connection) -> T:
            # If the answer to an earlier commit was lost, the server is asked first: work must not be done twice.
            if not await ask(connection, transaction.was_committed()):
                async with connection.transaction():
                    await ask(connection, transaction.statements())
            return transaction.result

        return await self.read(once)

    async def transact_in_thread(self, work: Callable[[], Queries[T]], *, snapshot: bool = False) -> T:
        """Do the same in a thread, for work with many statements, with computing between them, or that is rare."""
        transaction = _Transaction(work, snapshot)

        def once() -> T:
            with self._job_connection() as connection:
                if not ask_at_once(connection, transaction.was_committed()):
                    with connection.transaction():
                        ask_at_once(connection, transaction.statements())
            return transaction.result

        return await self.patiently(lambda: asyncio.to_thread(once))

    async def work_in_thread(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Run work with a connection in a thread. If the server is lost meanwhile, begin again."""

        def once() -> T:
            with self._job_connection() as connection:
                return work(connection)

        return await self.patiently(lambda: aside(once))

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        self.check()
        clock = asyncio.get_running_loop().time
        failed_at: float | None = None
        tries = 0
        while True:
            try:
                return await attempt()
            except Exception as error:  # around a request: errors of psycopg become errors of perdure
                failed_at = failed_at or clock()
                tries += 1
                may_pass = is_lost(error) or is_passing(error)
                # A transaction that others keep interfering with gets a few tries, however slow each of them is.
                is_over = clock() > failed_at + PATIENCE and not (is_passing(error) and tries < _LEAST_TRIES)
                is_taken = isinstance(error, psycopg.errors.UniqueViolation) and tries >= _MOST_TRIES_OF_A_KEY
                if is_over or is_taken or not may_pass:
                    raise as_store_error(error) from None
            await asyncio.sleep(_PAUSE)

    async def rows(self, query: str, parameters: dict[str, Any] | tuple[Any, ...] = ()) -> list[Any]:
        """Return all rows of a query."""

        async def fetch(connection: Connection) -> list[Any]:
            return await fetched(connection, query, parameters)

        return await self.read(fetch)

    async def row(self, query: str, parameters: dict[str, Any] | tuple[Any, ...] = ()) -> Any:
        """Return the first row, or None."""
        found = await self.rows(query, parameters)
        return found[0] if found else None


class Line:
    """A connection that one user keeps. To ask the pool for one takes longer than a short statement.

    If the pool is too small to keep one, the pool is asked after all.
    """

    def __init__(self, link: Link, *, is_kept: bool) -> None:
        self._link = link
        self._is_kept = is_kept
        self._connection: Connection | None = None

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """Yield the connection to a caller that uses it alone."""
        if not self._is_kept:
            async with self._link.connection() as connection:
                yield connection
            return
        self._link.check()
        connection = await self._sound()
        try:
            yield connection
        finally:
            if connection.pgconn.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                await connection.close()  # its user was cancelled in the middle
            self._link.look_at(connection)

    async def open(self) -> None:
        """Make the connection before the first caller needs it."""
        if self._is_kept:
            await self._sound()

    async def _sound(self) -> Connection:
        if self._connection is None or not self._link.is_trusted(self._connection):
            await self.close()
            self._connection = await self._link.connect(Impatient)
        return self._connection

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()


class _Transaction(Generic[T]):
    """Work that is done in one transaction. If the answer to its commit is lost, the server is asked for it."""

    result: T

    def __init__(self, work: Callable[[], Queries[T]], snapshot: bool) -> None:
        self._work = work
        self._snapshot = snapshot
        self._number: str | None = None
        """The transaction's number, once only the commit is left to do."""

    def statements(self) -> Queries[None]:
        self._number = None
        if self._snapshot:
            yield "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ", ()
            self.result = yield from self._work()
        else:
            ((number,),) = yield "SELECT pg_current_xact_id()::text", ()
            self.result = yield from self._work()
            # Only now: before that, a lost connection means that nothing was committed.
            self._number = number

    def was_committed(self) -> Queries[bool]:
        if self._number is None:
            return False
        ((status,),) = yield "SELECT pg_xact_status(%s::text::xid8)", (self._number,)
        # The server may not have noticed yet that the connection is lost, or the commit is still under way.
        if status == "in progress":
            raise _Undecided("the transaction of a lost connection is still open")
        return bool(status == "committed")


class _Undecided(psycopg.OperationalError):
    """The error for a transaction that may still be committed."""


async def ask(connection: Connection, queries: Queries[T]) -> T:
    """Send statements one by one, and give each answer to what makes the next."""
    try:
        query = next(queries)
        while True:
            query = queries.send(await fetched(connection, *query))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here
    finally:
        queries.close()


async def fetched(connection: Connection, query: str, values: Any) -> list[Any]:
    """Return the rows that a statement answers with. With a list of values, it is sent once for each."""
    if isinstance(values, list):
        async with connection.cursor() as cursor:
            await cursor.executemany(query.encode(), values)
            return []
    cursor = await connection.execute(query.encode(), values, binary=True)
    return await cursor.fetchall() if cursor.description else [(cursor.rowcount,)]


def ask_at_once(connection: psycopg.Connection[Any], queries: Queries[T]) -> T:
    """Do the same as `ask` in a thread of its own."""
    try:
        query = next(queries)
        while True:
            query = queries.send(_fetched_at_once(connection, *query))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]  # what a generator returns has no type here
    finally:
        queries.close()


def _fetched_at_once(connection: psycopg.Connection[Any], query: str, values: Any) -> list[Any]:
    if isinstance(values, list):
        with connection.cursor() as cursor:
            cursor.executemany(query.encode(), values)
            return []
    cursor = connection.execute(query.encode(), values, binary=True)
    return cursor.fetchall() if cursor.description else [(cursor.rowcount,)]


def is_lost(error: BaseException) -> bool:
    """Tell whether an error says that the connection is gone, and that another may do."""
    if isinstance(error, psycopg.InterfaceError | psycopg.errors.IdleInTransactionSessionTimeout):
        return True
    if not isinstance(error, psycopg.OperationalError) or isinstance(error, PoolTimeout | PoolClosed):
        return False
    state = error.sqlstate or ""
    # 08: connection exceptions; 57P01 to 57P03: the server is shutting down or starting up. None: no answer at all.
    return state == "" or state[:2] == "08" or state in ("57P01", "57P02", "57P03")


def is_passing(error: BaseException) -> bool:
    """Tell whether the same statement may succeed if it is sent again."""
    # If two add the same row, the later one looks again, and finds it there.
    passing = psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure | psycopg.errors.UniqueViolation
    return isinstance(error, passing | Interfered)


def as_store_error(error: BaseException) -> BaseException:
    """Return an error of psycopg as one of perdure's, and any other error unchanged."""
    if isinstance(error, PerdureError) or not isinstance(error, psycopg.Error | OSError | UnicodeError | Interfered):
        return error
    if isinstance(error, UnicodeEncodeError):
        return InvalidData("$", "a text holds half of a surrogate pair, which UTF-8 cannot carry")
    if isinstance(error, UnicodeDecodeError | psycopg.errors.DataCorrupted | psycopg.errors.IndexCorrupted):
        return CorruptRecord(None, "of the database", str(error))
    if isinstance(error, psycopg.errors.DiskFull):
        return StoreError("The server's disk is full. Nothing of this save was kept; free some space and repeat it.")
    if isinstance(error, psycopg.errors.LockNotAvailable):
        return StoreError(
            "Another client has held a lock for too long, and nothing was written. Repeat it; if that fails too, look "
            "for that client in pg_stat_activity, or set a longer lock_timeout in the `options` of the DSN."
        )
    if isinstance(error, PoolTimeout):
        return StoreError(
            f"No connection to PostgreSQL within {PATIENCE:g} s. Check the server; or take a larger pool."
        )
    if is_passing(error):
        return StoreError("Others' writes have come in between again and again. Try again later.")
    return StoreError(f"PostgreSQL failed: {error}")


def completed_dsn(dsn: str, **defaults: str) -> str:
    """Return a DSN, completed with the time-outs that it does not set."""
    given = _read(dsn)
    wanted: dict[str, str | int] = {**_DSN_DEFAULTS, **defaults}
    missing = {name: value for name, value in wanted.items() if name not in given}
    if "PGCONNECT_TIMEOUT" in os.environ:  # a value in the DSN would win over the user's
        missing.pop("connect_timeout", None)
    return conninfo.make_conninfo(dsn, **missing)


def _read(dsn: str) -> dict[str, Any]:
    """Return the settings in a DSN. No error quotes it, since it may contain a password."""
    unreadable = ConfigurationError(
        "The DSN cannot be read. Write it as postgresql://user:password@host:5432/name, "
        "with special characters of the password percent-encoded."
    )
    try:
        given = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        raise unreadable from None
    if _is_misread(dsn, given):
        raise unreadable from None
    return dict(given)


def _is_misread(dsn: str, given: Mapping[str, Any]) -> bool:
    """Tell whether a part of a password was read as a host, a port or a database.

    That happens if it has an @ or a / in it. libpq would quote that part in its errors.
    """
    _, is_url, rest = dsn.partition("://")
    behind_host = rest.partition("/")[2].partition("?")[0] if is_url else ""
    ports = str(given.get("port", "")).split(",")
    return "@" in f"{given.get('host')}{behind_host}" or not all(port.isdecimal() for port in ports if port)


def passwords_in(dsn: str) -> list[str]:
    """Return the passwords in a DSN, so that no error quotes them."""
    return [str(each) for name, each in _read(dsn).items() if "password" in name and len(str(each)) > 3]


def limiting(dsn: str, limits: dict[str, int]) -> list[sql.Composed]:
    """Return the statements that set limits, except those that the DSN sets in its `options`."""
    options = str(_read(dsn).get("options", ""))
    return [
        sql.SQL("SET {} = {}").format(sql.Identifier(name), sql.Literal(limit))
        for name, limit in limits.items()
        if name not in options
    ]


class Impatient(psycopg.AsyncConnection[Any]):
    """A connection that is closed if the server falls silent in the middle of a statement."""

    async def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return await super().wait(_while_heard(self, gen, PATIENCE), *args, **options)


class ImpatientJob(psycopg.Connection[Any]):
    """A connection like `Impatient`, for a job in a thread."""

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return super().wait(_while_heard(self, gen, _PATIENCE_WITH_JOBS), *args, **options)


def _while_heard(connection: Impatient | ImpatientJob, gen: Any, most: float) -> Generator[Any, Any, Any]:
    """Continue an exchange with the server while it answers. Raise OperationalError if it is silent for too long."""
    heard = monotonic()
    try:
        wanted = next(gen)
        while True:
            # psycopg comes back ten times a second, with 0 if nothing has arrived.
            ready = yield wanted
            if ready:
                heard = monotonic()
            elif monotonic() > heard + most:
                connection.pgconn.finish()
                raise psycopg.OperationalError(f"the server has said nothing for {most:g} s")
            wanted = gen.send(ready)
    except StopIteration as done:
        return done.value
