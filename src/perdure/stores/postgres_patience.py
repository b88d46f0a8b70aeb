"""How long PostgreSQL is waited for, on either side: no client that stops, and no line that falls silent, holds others.

The server ends a transaction whose client says nothing more. The client closes a line on which it hears nothing more.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from time import monotonic
from typing import Any

import psycopg
from psycopg import conninfo, sql

from perdure.errors import ConfigurationError

PATIENCE = 30.0
"""How long a lost server is waited for, in seconds, and how long one may be silent before it counts as lost."""
_PATIENCE_WITH_JOBS = 600.0
"""The same for a job of many statements, each of which may read a whole table before it answers."""
# In milliseconds. The lock's is the longer one: those who wait for a client that has stopped are to succeed.
LIMITS = {"idle_in_transaction_session_timeout": 10_000, "lock_timeout": 20_000}
# A job computes between its statements.
LIMITS_OF_JOBS = {"idle_in_transaction_session_timeout": 60_000, "lock_timeout": 20_000}
_DSN_DEFAULTS = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
}


def completed_dsn(dsn: str, **defaults: str) -> str:
    """Return a DSN with the time-outs that it does not set itself."""
    given = _read(dsn)
    wanted: dict[str, str | int] = {**_DSN_DEFAULTS, **defaults}
    missing = {name: value for name, value in wanted.items() if name not in given}
    if "PGCONNECT_TIMEOUT" in os.environ:
        missing.pop("connect_timeout", None)
    return conninfo.make_conninfo(dsn, **missing)


def _read(dsn: str) -> dict[str, Any]:
    """Return what a DSN says. No error quotes it: it has a password in it."""
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
    """Tell whether a part of a password is taken for a host, a port or a database, because of an @ or a / in it.

    libpq would quote it as one in its errors.
    """
    _, is_url, rest = dsn.partition("://")
    behind_host = rest.partition("/")[2].partition("?")[0] if is_url else ""
    ports = str(given.get("port", "")).split(",")
    return "@" in f"{given.get('host')}{behind_host}" or not all(port.isdecimal() for port in ports if port)


def passwords_in(dsn: str) -> list[str]:
    """Return the passwords in a DSN, so that no error quotes them."""
    return [str(each) for name, each in _read(dsn).items() if "password" in name and len(str(each)) > 3]


def limiting(dsn: str, limits: dict[str, int]) -> list[sql.Composed]:
    """Return the statements that set limits. One that the DSN sets in its `options` stays as it is."""
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
    """The same for a job in a thread."""

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        return super().wait(_while_heard(self, gen, _PATIENCE_WITH_JOBS), *args, **options)


def _while_heard(connection: Impatient | ImpatientJob, gen: Any, most: float) -> Generator[Any, Any, Any]:
    """Carry on an exchange with the server while it says something. Raise if it says nothing for a while."""
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
