"""Sessions in a PostgreSQL database, which any number of processes on any number of machines may share."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from perdure.errors import ConfigurationError, InvalidData
from perdure.model.checks import expect_count
from perdure.model.ids import SessionId
from perdure.protocols import KeyRing

try:
    import psycopg_pool as psycopg_pool
except ImportError:
    raise ConfigurationError(
        "PostgresStore needs psycopg and its pool. Install them: pip install 'perdure[postgres]'."
    ) from None

from perdure.stores import checked
from perdure.stores.postgres.engine import PostgresEngine
from perdure.stores.postgres.link import Link
from perdure.stores.postgres.schema import check_schema
from perdure.stores.store import IndexedStore


class PostgresStore(IndexedStore):
    """A store in a PostgreSQL database. A save is one statement, and so are all saves of a process that wait together.

    `schema` separates tenants within a database, and is created if it is missing. `pool` is the most connections
    that are held. `cache` is how many sessions are kept in memory, each checked against the database at every load.
    With `keys`, what is written is sealed, as the page Encryption at rest explains.
    """

    _engine: PostgresEngine

    def __init__(
        self,
        dsn: str,
        *,
        schema: str = "perdure",
        pool: int = 8,
        cache: int = 128,
        keys: KeyRing | None = None,
    ) -> None:
        if not isinstance(dsn, str) or not dsn.strip():
            raise InvalidData("$.dsn", "a PostgresStore needs the address of a database, as postgresql://host/name")
        self._schema = check_schema(schema)
        engine = PostgresEngine(dsn, schema, expect_count(pool, "$.pool", least=1))
        super().__init__(engine, cache=expect_count(cache, "$.cache"), keys=checked.keys(keys))

    @property
    def is_open(self) -> bool:
        return self._engine.is_open

    @property
    def link(self) -> Link:
        """Return the connections of the open store, for others that keep their tables in the same schema."""
        return self._engine.opened.link

    async def __aexit__(self, *error: object) -> None:
        if self._engine.is_abandoned:  # a forked child has none of its parent's claims
            self._claims.clear()
        await super().__aexit__(*error)

    async def changed(self, session_id: str, after: int, most: float) -> None:
        """Return once a session's record goes beyond entry `after`, or after `most` seconds in any case."""
        checked.changed(after, most)
        await self._engine.opened.listener.changed(SessionId(session_id), after, most)

    def listening(self, session_id: str) -> AbstractAsyncContextManager[Callable[[float], Awaitable[None]]]:
        """Listen to a session within the block. What is written of it is heard at once."""
        return self._engine.opened.listener.listening(SessionId(session_id))
