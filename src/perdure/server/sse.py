"""Streams of events (SSE): an `id` is a place on the session's record, so any server process can continue one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from perdure.errors import InvalidData, PerdureError
from perdure.model.ids import SessionId
from perdure.server.call import Call, encoded
from perdure.server.feeds import Lagging, News, Piece
from perdure.server.problems import problem_of

Events = AsyncGenerator[ServerSentEvent, None]
Farewell = Callable[[str], ServerSentEvent]
"""Makes the last event of a stream that has to end for a reason of the service's own."""
RETRY = 2000
"""Milliseconds until a browser connects again."""
PING = 15


def place_of(call: Call, given: int | None) -> int:
    """Return the place behind which a stream begins: by `Last-Event-ID`, else by the query, else at the beginning."""
    last = call.request.headers.get("last-event-id", "").strip()
    if not last:
        return given or 0
    if not last.isdecimal() or len(last) > 18:
        raise InvalidData("Last-Event-ID", "it is not an id of this stream; ids are numbers")
    return int(last)


async def event_stream(call: Call, session_id: SessionId, after: int) -> EventSourceResponse:
    """Return the events of a session behind a place, and those to come."""
    call.service.require_room(call.caller)
    end = await call.service.feeds.end_of(session_id)
    return streamed(call, _events(call, session_id, after, end))


def ended(reason: str) -> ServerSentEvent:
    """Return the event that ends a stream of the API, and says why."""
    return ServerSentEvent(_json({"reason": reason}), event="end", retry=RETRY, sep="\n")


def streamed(call: Call, events: Events, farewell: Farewell = ended) -> EventSourceResponse:
    """Return a response that sends events until they end, the caller may not listen any more, or the service stops."""
    patience = call.service.settings.limits.patience
    headers = {"X-Accel-Buffering": "no", "Cache-Control": "no-store"}
    return EventSourceResponse(
        until_told(call, events, farewell), ping=PING, send_timeout=patience, headers=headers, sep="\n"
    )


async def until_told(call: Call, events: Events, farewell: Farewell = ended) -> Events:
    """Yield events. The last one says why there are no more, unless the events have ended by themselves."""
    watch = asyncio.ensure_future(call.service.watch(call.caller))
    following: asyncio.Future[ServerSentEvent | None] | None = None
    try:
        async with call.service.stream(call.caller):
            while True:
                following = asyncio.ensure_future(anext(events, None))
                await asyncio.wait({following, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():
                    yield farewell(watch.result())
                    return
                event = following.result()
                if event is None:
                    return
                yield event
    finally:
        watch.cancel()
        if following is not None:  # a client that leaves ends this in the middle of a wait
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await events.aclose()


async def _events(call: Call, session_id: SessionId, after: int, end: int) -> Events:
    yield ServerSentEvent(comment="perdure", retry=RETRY, sep="\n")
    if after > end:  # the store was restored, or the id is not of this session
        yield ServerSentEvent(_json({"end": end}), event="reset", id=str(end), sep="\n")
        after = end
    try:
        async for each in call.service.feeds.news(session_id, after):
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
