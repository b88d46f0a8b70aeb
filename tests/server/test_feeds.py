"""What listeners hear of a session: all of it, in order, also if the store fails meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

import perdure
from perdure.errors import StoreError
from perdure.model.ids import SessionId
from perdure.server.feeds import Feeds


async def test_nothing_is_missed_after_the_store_has_failed() -> None:
    """The listener comes back before its session is forgotten, and hears what was said meanwhile."""
    async with perdure.connect("memory://", model="offline") as sessions:
        chat = await sessions.open("s")
        await chat.send("one")
        feeds = Feeds(sessions)
        place = await feeds.end_of(chat.id)
        with pytest.raises(StoreError):
            await until_failed(feeds, chat.id)
        await chat.send("two")
        end, heard = await feeds.end_of(chat.id), []
        async with asyncio.timeout(5), aclosing(feeds.news(chat.id, place)) as news:
            async for each in news:
                heard.append(each.cursor)  # type: ignore[union-attr]
                if heard[-1] == end:
                    break
        assert heard == list(range(place + 1, end + 1))
        await feeds.close()


async def until_failed(feeds: Feeds, session_id: str) -> None:
    """Listen from the beginning to a store that fails as soon as the end is reached."""
    end = await feeds.end_of(SessionId(session_id))
    async with asyncio.timeout(5), aclosing(feeds.news(SessionId(session_id), 0)) as news:
        async for each in news:
            if each.cursor == end:  # type: ignore[union-attr]
                fail(feeds, session_id)


def fail(feeds: Feeds, session_id: str) -> None:
    """Have the next look at a session's record fail, once."""
    feed = feeds._feeds[session_id]  # type: ignore[index]
    look = feed._look

    async def failing() -> bool:
        feed._look = look  # type: ignore[method-assign]
        raise StoreError("the store is away")

    feed._look = failing  # type: ignore[method-assign]
    feed.wake()
