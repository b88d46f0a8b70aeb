"""Faults that tests put into workers on purpose: each function breaks one thing in the process that calls it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from tests.store_breaks import without_epochs as without_epochs

from perdure.actions.inbox import Inbox
from perdure.stores import claims
from perdure.workers import Worker


def elsewhere() -> None:
    """Make this process look like one on another machine."""
    machine = str(uuid.uuid4())
    claims.boot_id = lambda: machine


def without_sweep() -> None:
    """Never look for runs that have died, nor for lost jobs."""
    from perdure.workers.procrastinate.sweep import Sweep

    async def nothing(self: Any) -> None: ...

    Worker._sweep = nothing  # type: ignore[method-assign]
    Sweep._stalled = Sweep._forgotten = nothing  # type: ignore[method-assign]


def without_claims() -> None:
    """Take a session from its holder. PostgreSQL only."""
    from perdure import PostgresStore

    claim = PostgresStore.claim

    async def taken(self: Any, session_id: str, **more: Any) -> Any:
        await self.link.rows("UPDATE session SET claim = NULL, expires = NULL WHERE id = %s", (str(session_id),))
        return await claim(self, session_id, **more)

    PostgresStore.claim = taken  # type: ignore[method-assign]


def dies_after_a_post() -> None:
    """Get killed as soon as a message is in the store."""
    post = Inbox.post

    async def posted(self: Inbox, *args: Any, **more: Any) -> NoReturn:
        await post(self, *args, **more)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it was killed")

    Inbox.post = posted  # type: ignore[method-assign]


def stays_before_a_commit() -> None:
    """Write all of a message, say so, and never commit. PostgreSQL only."""

    def stays() -> NoReturn:
        print("written", flush=True)
        signal.pause()
        raise AssertionError("it was killed")

    _after_a_post(lambda: iter(stays, None))


def slow_posts(seconds: float) -> None:
    """Delay the commit of messages. PostgreSQL only."""

    def sleeps() -> Iterator[Any]:
        yield "SELECT pg_sleep(%s)", (seconds,)

    _after_a_post(sleeps)


def _after_a_post(queries: Callable[[], Iterator[Any]]) -> None:
    """Carry out further statements in the transaction of a post, after all others."""
    from perdure.stores.postgres import inbox

    original, post = inbox.Inbox._post_counted, inbox.Inbox.post

    async def in_a_transaction(self: Any, session_id: str, item: Any) -> int:
        return await post(self, session_id, item._replace(most_of_owner=10_000))

    def posted(self: Any, *args: Any) -> Any:
        seq = yield from original(self, *args)
        yield from queries()
        return seq

    inbox.Inbox._post_counted = posted  # type: ignore[method-assign]
    inbox.Inbox.post = in_a_transaction  # type: ignore[method-assign]
