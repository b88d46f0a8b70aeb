"""Streams of events (SSE): an `id` is a place on the session's record, so any server process can continue one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse, ServerSentEvent

from perdure.aio import finish_despite_cancel
from perdure.errors import InvalidData, PerdureError
from perdure.model.ids import SessionId
from perdure.server.call import Call, encoded
from perdure.server.feeds import Lagging, News, Piece
from perdure.server.problems import problem_of

T = TypeVar("T")
Events = AsyncGenerator[ServerSentEvent, None]
Farewell = Callable[[str], ServerSentEvent]
"""A function that makes the last event of a stream that the service has to end."""
_NO_MORE = object()
RETRY = 2000
"""Milliseconds until a browser connects again."""
PING = 15
FULL = "full"
"""The reason of a stream that ends at once because too many are open."""


def place_of(call: Call, given: int | None) -> int:
    """Return the place after which a stream begins: by `Last-Event-ID`, else by the query, else at the beginning."""
    last = call.request.headers.get("last-event-id", "").strip()
    if not last:
        return given or 0
    # 18 digits always fit into 64 bits. A longer number could not be a place.
    if not last.isdecimal() or len(last) > 18:
        raise InvalidData("Last-Event-ID", "it is not an id of this stream; ids are numbers")
    return int(last)


async def event_stream(call: Call, session_id: SessionId, after: int) -> EventSourceResponse:
    """Return the events of a session after a place, and those to come."""
    call.service.require_room(call.caller)
    end = await call.service.feeds.end_of(session_id)
    return streamed(call, _events(call, session_id, after, end))


def ended(reason: str) -> ServerSentEvent:
    """Return the event that ends a stream of the API, and says why."""
    return ServerSentEvent(_json({"reason": reason}), event="end", retry=RETRY, sep="\n")


def streamed(call: Call, events: Events, farewell: Farewell = ended) -> EventSourceResponse:
    """Return a response that sends events until they end, the caller may not listen any more, or the service stops."""
    # Our own server cuts a reader off that takes nothing, in less than this time. Other servers may not.
    patience = 3 * call.service.settings.limits.patience
    # nginx buffers a stream unless it is told not to.
    headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
    return EventSourceResponse(
        until_told(call, events, farewell), ping=PING, send_timeout=patience, headers=headers, sep="\n"
    )


async def until_told(call: Call, events: Events, farewell: Farewell = ended) -> Events:
    """Yield events. If the service has to end them, the last one says why."""
    watch = asyncio.ensure_future(call.service.watch(call.caller))
    try:
        if not call.service.has_room(call.caller):  # others were opened since the request was let in
            yield farewell(FULL)
            return
        async with call.service.stream(call.caller), aclosing(until(events, watch)) as following:
            async for event in following:
                yield event
            if watch.done():
                yield farewell(watch.result())
    finally:
        watch.cancel()


async def until(events: AsyncGenerator[T, None], stop: asyncio.Future[Any]) -> AsyncGenerator[T, None]:
    """Yield events until they end or `stop` is done. They are closed then, even if the listener has left."""
    following: asyncio.Future[Any] | None = None
    try:
        while True:
            following = asyncio.ensure_future(anext(events, _NO_MORE))
            await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done() or following.result() is _NO_MORE:
                return
            yield following.result()
    finally:
        # A generator cannot be closed while it runs, and a listener that goes away is cancelled again and again.
        await finish_despite_cancel(_closed(events, following))


async def _closed(events: AsyncGenerator[T, None], following: asyncio.Future[Any] | None) -> None:
    if following is not None and not following.done():
        following.cancel()
        await asyncio.wait({following})
    await events.aclose()


async def _events(call: Call, session_id: SessionId, after: int, end: int) -> Events:
    yield ServerSentEvent(comment="perdure", retry=RETRY, sep="\n")
    if after > end:  # the store was restored, or the id is not of this session
        yield ServerSentEvent(_json({"end": end}), event="reset", id=str(end), sep="\n")
        after = end
    try:
        async with aclosing(call.service.feeds.news(session_id, after)) as news:
            async for each in news:
                yield as_event(each)
    except Lagging:
        yield ServerSentEvent(_json({"reason": "lagging"}), event="end", sep="\n")
    except PerdureError as error:
        yield ServerSentEvent(_json(told(error)), event="end", sep="\n")


def as_event(news: News) -> ServerSentEvent:
    """Return an event of a run as one of the stream. A piece has no id: it is not on record."""
    if isinstance(news, Piece):
        return ServerSentEvent(_json(news), event="piece", sep="\n")
    kind = type(news).__struct_config__.tag
    return ServerSentEvent(_json(news.to_dict()), event=str(kind), id=str(news.cursor), sep="\n")


def told(error: Exception) -> dict[str, Any]:
    """Return an error as the last event of a stream tells it."""
    problem = problem_of(error)
    return {"reason": "error", "type": problem.type, "title": problem.title, "detail": problem.detail}


def _json(value: Any) -> str:
    return encoded(value).decode()
