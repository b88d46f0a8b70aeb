"""Responses as streams: what the record has, then what comes, until the response is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from perdure.errors import PerdureError
from perdure.server.call import Call, encoded
from perdure.server.feeds import Lagging, News, Piece
from perdure.server.openai.errors import body_of
from perdure.server.openai.finding import Found, events_of, find, outcome_of, settled
from perdure.server.openai.telling import Telling, Told
from perdure.server.problems import problem_of
from perdure.server.sse import Events, streamed
from perdure.sessions.sessions import Sessions

_DONE = "[DONE]"


def stream_of(call: Call, found: Found, after: int = -1) -> EventSourceResponse:
    """Return a response as a stream of events behind a number, and of those to come."""
    call.service.require_room(call.caller)
    return streamed(call, _sent(_told(call, found, after)), farewell=_farewell)


def sent_at_once(call: Call, events: AsyncIterator[Told]) -> EventSourceResponse:
    """Return events that are known, as a stream."""
    call.service.require_room(call.caller)
    return streamed(call, _sent(events), farewell=_farewell)


async def _sent(events: AsyncIterator[Told]) -> Events:
    try:
        async for event in events:
            yield _event(event)
    except Lagging:
        yield _failed("lagging", "The stream was read too slowly. Continue it: `stream=true&starting_after=N`.")
        return
    except PerdureError as error:
        told = body_of(problem_of(error))
        yield _failed(told["code"], told["message"])
        return
    yield ServerSentEvent(_DONE, sep="\n")


def _farewell(reason: str) -> ServerSentEvent:
    """Return the last event of a stream that has to end before its response does."""
    return _failed(reason, "The stream ends here, and the response goes on. Continue it: GET with `starting_after`.")


def _failed(code: str, message: str) -> ServerSentEvent:
    return _event({"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0})


def _event(told: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(encoded(told).decode(), event=str(told["type"]), sep="\n")


async def _told(call: Call, found: Found, after: int) -> AsyncIterator[Told]:
    sessions, telling = call.sessions, Telling(found, after)
    for each in telling.opening():
        yield each
    if found.state != "over":
        async with aclosing(_followed(call, sessions, found, telling)) as news:
            async for each in news:
                yield each
        found = await find(sessions, str(found.id))
    for each in telling.begun(found):
        yield each
    for event in await events_of(sessions, found):
        for each in telling.take(event):
            yield each
    for each in telling.end(found, await outcome_of(sessions, found)):
        yield each


async def _followed(call: Call, sessions: Sessions, found: Found, telling: Telling) -> AsyncGenerator[Told, None]:
    """Yield what comes until the response is over. What was missed is on record."""
    over = asyncio.ensure_future(settled(sessions, found.id))
    # One that waits has noted where the record ended before it.
    begin = found.begin - 1 if found.begin else int(found.asked.get("after") or 0)
    try:
        async with aclosing(call.service.feeds.news(found.info.id, begin)) as news:
            while not over.done():
                following = asyncio.ensure_future(anext(news, None))
                await asyncio.wait({following, over}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
                    break
                for each in await _heard(sessions, found, telling, following.result()):
                    yield each
        over.result()
    finally:
        over.cancel()
        await asyncio.gather(over, return_exceptions=True)


async def _heard(sessions: Sessions, found: Found, telling: Telling, news: News | None) -> list[Told]:
    """Return what news add to a response. The run of one that waited is found once anything happens."""
    told: list[Told] = []
    if telling.run is None:
        told += telling.begun(await find(sessions, str(found.id)))
    if isinstance(news, Piece):
        told += telling.hear(news)
    elif news is not None:
        told += telling.take(news)
    return told
