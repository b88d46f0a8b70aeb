"""The way to the server: a pool of connections that heals, and what its errors mean."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import psycopg
from psycopg import sql
from psycopg_pool import AsyncConnectionPool, PoolClosed, PoolTimeout

from perdure.errors import CorruptRecord, InvalidData, PerdureError, StoreError
from perdure.stores import postgres_patience as patience
from perdure.stores.postgres_patience import Impatient, ImpatientJob, completed_dsn, limiting

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]

GATE = 0x70657264
"""The advisory lock that erasures take for themselves, and shares those who are about to use a value or a log."""
_PAUSE = 0.05
_MOST_TRIES = 10
# Plans are made once, for tables that may have been empty then: each row is to be found by an index all the same.
_SETTINGS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_bitmapscan": "off",
    "client_min_messages": "warning",
}


class Link:
    """Connections to one schema of one database, for one process and one event loop."""

    def __init__(self, dsn: str, schema: str, most: int) -> None:
        self.schema = schema
        self.channel = f"perdure {schema}"[:63]
        self._dsn = completed_dsn(dsn, fallback_application_name=self.channel)
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self.closed = False
        self._made: WeakSet[Connection] = WeakSet()
        self._trusted: WeakSet[Connection] = WeakSet()
        self._pool: AsyncConnectionPool[Connection] = AsyncConnectionPool(
            self._dsn,
            connection_class=Impatient,
            open=False,
            min_size=min(2, most),
            max_size=most,
            kwargs={"autocommit": True, "prepare_threshold": 0},
            configure=self._configure,
            timeout=patience.PATIENCE,
            name=f"perdure {schema}",
        )

    async def open(self) -> None:
        try:
            await self._pool.open(wait=True, timeout=patience.PATIENCE)
        except PoolTimeout as error:
            raise StoreError(
                f"No connection to PostgreSQL: {str(error).rstrip('.? ')}. Check the DSN and that the server runs."
            ) from None

    async def close(self) -> None:
        self.closed = True
        await self._pool.close()

    @property
    def is_abandoned(self) -> bool:
        """Tell whether the process or the loop that has opened it is not there to close it."""
        return self._pid != os.getpid() or self._loop.is_closed()

    def abandon(self) -> None:
        """Let go of the connections without a word to the server, which a forked child shares with its parent."""
        self.closed = True
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

    async def connect(self) -> Connection:
        """A connection outside of the pool, for as long as the caller likes."""
        connection: Connection = await psycopg.AsyncConnection.connect(self._dsn, autocommit=True)
        await self._configure(connection)
        return connection

    async def _configure(self, connection: Connection) -> None:
        self._made.add(connection)
        await connection.execute(self._setup(patience.LIMITS), prepare=False)
        self._trusted.add(connection)

    def _setup(self, limits: dict[str, int]) -> sql.Composed:
        settings = [sql.SQL("SET {} = {}").format(sql.Identifier(k), sql.Literal(v)) for k, v in _SETTINGS.items()]
        path = sql.SQL("SET search_path = {}").format(sql.Identifier(self.schema))
        return sql.SQL("; ").join([*settings, *limiting(self._dsn, limits), path])

    async def whole(self, job: Callable[[psycopg.Connection[Any]], T], *, snapshot: bool = False) -> T:
        """What a job does in one transaction, in a thread: for what takes many statements, and is not asked for often.

        With a `snapshot` it reads the database as it was when it began.
        """
        self.check()
        for _ in range(_MOST_TRIES):
            try:
                return await asyncio.to_thread(self._in_transaction, job, snapshot)
            except psycopg.Error as error:
                if not is_passing(error) and not isinstance(error, psycopg.errors.IdleInTransactionSessionTimeout):
                    raise as_store_error(error) from None
        raise StoreError("Others' writes have come in between again and again. Try it later.")

    def _in_transaction(self, job: Callable[[psycopg.Connection[Any]], T], snapshot: bool) -> T:
        with ImpatientJob.connect(self._dsn) as connection:
            connection.execute(self._setup(patience.LIMITS_OF_JOBS))
            connection.commit()
            if snapshot:
                connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            return job(connection)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection of the pool's.

        Before Python 3.12 the pool's wait swallows a cancellation that comes in the same moment as the connection, and
        whoever waits for the cancelled task would wait for ever; so it is looked for here.
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
        """Yield a connection that was made since the last one was lost: where one is cut, the others may be too."""
        while True:
            async with self._pool.connection() as connection:
                if connection not in self._trusted:
                    await connection.close()  # the pool makes another for it
                    continue
                try:
                    yield connection
                finally:
                    if connection.closed:
                        self._trusted.clear()
                return

    async def read(self, job: Callable[[Connection], Awaitable[T]]) -> T:
        """What a job reads, tried again while the server is lost, or others' locks are in the way.

        If it writes, then what may be written twice.
        """
        self.check()
        clock = asyncio.get_running_loop().time
        failed_at: float | None = None
        while True:
            try:
                async with self.connection() as connection:
                    return await job(connection)
            except Exception as error:  # around a request: what psycopg says is said in perdure's words
                failed_at = failed_at or clock()
                may_pass = is_lost(error) or is_passing(error)
                if not may_pass or clock() > failed_at + patience.PATIENCE:
                    raise as_store_error(error) from None
            await asyncio.sleep(_PAUSE)

    async def rows(self, query: str, parameters: dict[str, Any] | tuple[Any, ...] = ()) -> list[Any]:
        """All rows of a query."""

        async def fetch(connection: Connection) -> list[Any]:
            return await (await connection.execute(query, parameters, binary=True)).fetchall()

        return await self.read(fetch)

    async def row(self, query: str, parameters: dict[str, Any] | tuple[Any, ...] = ()) -> Any:
        """The first row, or None."""
        found = await self.rows(query, parameters)
        return found[0] if found else None


def is_lost(error: BaseException) -> bool:
    """Whether an error says that the connection is gone, and that another may do."""
    if isinstance(error, psycopg.InterfaceError | psycopg.errors.IdleInTransactionSessionTimeout):
        return True
    if not isinstance(error, psycopg.OperationalError) or isinstance(error, PoolTimeout | PoolClosed):
        return False
    state = error.sqlstate or ""
    # 08: connection exceptions; 57P01 to 57P03: the server is shutting down or starting up. None: no answer at all.
    return state == "" or state[:2] == "08" or state in ("57P01", "57P02", "57P03")


def is_passing(error: BaseException) -> bool:
    """Whether the same statement may succeed if it is sent again."""
    return isinstance(error, psycopg.errors.DeadlockDetected | psycopg.errors.SerializationFailure)


def as_store_error(error: BaseException) -> BaseException:
    """What psycopg says in perdure's words; anything else as it is."""
    if isinstance(error, PerdureError) or not isinstance(error, psycopg.Error | OSError | UnicodeError):
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
            f"No connection to PostgreSQL within {patience.PATIENCE:g} s. Check the server; or take a larger pool."
        )
    return StoreError(f"PostgreSQL failed: {error}")
