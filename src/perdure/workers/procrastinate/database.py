"""The database of a store, as the dispatcher needs it. It is the `link` of a PostgresStore."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import psycopg

from perdure.errors import ConfigurationError

T = TypeVar("T")
Connection = psycopg.AsyncConnection[Any]
_LONGEST_SCHEMA = 32
"""The longest name of a schema that is put into a queue's name as it is. PostgreSQL's names of channels have at most 63
characters, and procrastinate's begin with 23."""


class Database(Protocol):
    """A source of connections to one schema of a database. Lost connections are made again."""

    schema: str

    async def connect(self) -> Connection:
        """Return a new connection that only the caller uses."""
        ...

    async def read(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        """Do something with a connection. Repeat it while the server is lost, and raise StoreError if it stays lost."""
        ...

    async def patiently(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Do something. Repeat it while the server is lost, and raise StoreError if it stays lost."""
        ...

    async def rows(self, query: str, parameters: dict[str, Any] | tuple[Any, ...] = ()) -> list[Any]:
        """Return the rows of a statement."""
        ...


def database_of(store: object) -> Database:
    """Return the database of a store. Raise ConfigurationError if the store is not kept in PostgreSQL."""
    link: Database | None = getattr(store, "link", None)
    if link is None:
        raise ConfigurationError(
            f"A {type(store).__name__} is not kept in PostgreSQL, and procrastinate works nowhere else. "
            "Use an InboxDispatcher, or no dispatcher: the worker chooses one."
        )
    return link


def queue_of(schema: str) -> str:
    """Return the name of the queue of a schema.

    Each schema needs its own, since procrastinate's notifications reach the whole database.
    """
    if len(schema) > _LONGEST_SCHEMA:
        schema = f"{schema[:15]}:{hashlib.blake2b(schema.encode(), digest_size=8).hexdigest()}"
    return f"perdure:{schema}"
