"""Feeds of sessions: what listeners get if the store fails once, or a session goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests import postgres_server

import perdure
from perdure.errors import SessionNotFound, StoreError
from perdure.server.feeds import Feeds, Piece
from perdure.testing import FailingStore, ScriptedDriver

_SOON = 5.0


async def places(feeds: Feeds, chat: perdure.Chat, after: int, many: int) -> list[int]:
    """Return the places of the next events."""
    found: list[int] = []
    async with asyncio.timeout(_SOON):
        async for each in feeds.news(chat.id, after):
            found += [] if isinstance(each, Piece) else [each.cursor or 0]
            if len(found) == many:
                break
    return found


@asynccontextmanager
async def watched(store: Any) -> AsyncIterator[tuple[perdure.Chat, Feeds, int]]:
    """Return a chat with a message, feeds, and the end of its record."""
    async with perdure.connect(store, driver=ScriptedDriver(lambda request: "one")) as sessions:
        chat = await sessions.open("a")
        await chat.send("hello")
        feeds = Feeds(sessions)
        try:
            yield chat, feeds, await feeds.end_of(chat.id)
        finally:
            await feeds.close()


async def test_a_listener_is_told_if_the_first_look_fails(tmp_path: Path) -> None:
    store = FailingStore(perdure.SqliteStore(tmp_path / "a.db"))
    async with watched(store) as (chat, feeds, _):
        store.fail("progress")
        with pytest.raises(StoreError):
            await places(feeds, chat, 0, 1)
        assert await places(feeds, chat, 0, 2) == [1, 2]


async def test_a_feed_that_has_failed_loses_nothing(tmp_path: Path) -> None:
    """A listener that comes again gets what was written in between."""
    store = FailingStore(perdure.SqliteStore(tmp_path / "a.db"))
    async with watched(store) as (chat, feeds, end):
        listening = asyncio.ensure_future(places(feeds, chat, end, 1))
        await asyncio.sleep(0.05)
        store.fail("progress")
        with pytest.raises(StoreError):
            await listening
        await chat.send("and more")
        new = await feeds.end_of(chat.id) - end
        assert await places(feeds, chat, end, new) == list(range(end + 1, end + new + 1))


async def test_listeners_are_told_that_a_session_was_erased(tmp_path: Path) -> None:
    async with watched(f"sqlite:///{tmp_path}/a.db") as (chat, feeds, end):
        listening = asyncio.ensure_future(places(feeds, chat, end, 1))
        await asyncio.sleep(0.05)
        await chat.erase()
        with pytest.raises(SessionNotFound):
            await listening
        with pytest.raises(SessionNotFound):
            await places(feeds, chat, 0, 1)


class _Busy(perdure.PostgresStore):
    """A store to which another process writes right after each look."""

    then: Callable[[], Awaitable[Any]] | None = None

    async def progress(self, *args: Any, **kwargs: Any) -> Any:
        found = await super().progress(*args, **kwargs)
        then, self.then = self.then, None
        if then is not None:
            await then()
        return found


async def test_what_is_written_while_a_feed_begins_is_heard_soon(tmp_path: Path) -> None:
    """This holds though the store reports news by itself, and nobody looks again before that."""
    store = _Busy(postgres_server.dsn(), schema=postgres_server.schema_of(tmp_path))
    async with watched(store) as (chat, feeds, end):
        async with store.listening("a"):  # the first listener is told to look in any case
            pass
        store.then = lambda: chat.send("and more")
        assert await places(feeds, chat, end, 2) == [end + 1, end + 2]
