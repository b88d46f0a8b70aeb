"""Responses as streams: what the record has, then what comes, until the response is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent

from perdure.aio import finish_despite_cancel
from perdure.errors import PerdureError
from perdure.server.call import Call, encoded
from perdure.server.feeds import Lagging, News, Piece
from perdure.server.openai.errors import body_of
from perdure.server.openai.finding import Found, events_of, find, outcome_of, settled
from perdure.server.openai.telling import Telling, Told
from perdure.server.problems import Problem, problem_of
from perdure.server.sse import Events, streamed, until
from perdure.sessions.sessions import Sessions

# OpenAI's clients read until this.
_DONE = "[DONE]"


def stream_of(call: Call, found: Found, after: int = -1) -> EventSourceResponse:
    """Return a response as a stream: the events after a number, and those to come."""
    return sent(call, _told(call, found, after), after)


def sent(
    call: Call, events: AsyncGenerator[Told, None], after: int = -1, *, is_kept: bool = True
) -> EventSourceResponse:
    """Return events as a stream. One of a response that is not kept cannot be continued."""
    call.service.require_room(call.caller)
    sending = _Sending(events, after, is_kept)
    return streamed(call, sending.events(), farewell=sending.farewell)


class _Sending:
    """A stream that is being sent. If it breaks off, its last event has the number to continue from."""

    def __init__(self, events: AsyncGenerator[Told, None], after: int, is_kept: bool) -> None:
        self._events = events
        self._is_kept = is_kept
        self._last = max(after, 0)

    async def events(self) -> Events:
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    self._last = event["sequence_number"]
                    yield _event(event)
        except Lagging:
            yield self._broken("lagging", "The stream was read too slowly.")
            return
        except (PerdureError, Problem) as error:
            problem = problem_of(error)
            told = body_of(problem)
            # A problem of the request itself would come again.
            yield self._broken(told["code"], told["message"], may_continue=problem.status >= 500)
            return
        yield ServerSentEvent(_DONE, sep="\n")

    def farewell(self, reason: str) -> ServerSentEvent:
        """Return the last event of a stream that has to end before its response does."""
        rest = "The response continues." if self._is_kept else "The response ends with it: it is not kept."
        return self._broken(reason, f"The stream has to end here. {rest}")

    def _broken(self, code: str, why: str, *, may_continue: bool = True) -> ServerSentEvent:
        how = f" Continue with GET and `stream=true&starting_after={self._last}`."
        message = why + how if may_continue and self._is_kept else why
        told = {"code": code, "message": message, "param": None, "sequence_number": self._last}
        return _event({"type": "error", **told})


def _event(told: Mapping[str, Any]) -> ServerSentEvent:
    return ServerSentEvent(encoded(told).decode(), event=str(told["type"]), sep="\n")


async def _told(call: Call, found: Found, after: int) -> AsyncGenerator[Told, None]:
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
    # A message that waits has noted where the record ended before it.
    begin = found.begin - 1 if found.begin else int(found.asked.get("after") or 0)
    try:
        async with aclosing(until(call.service.feeds.news(found.info.id, begin), over)) as news:
            async for each in news:
                for told in await _heard(sessions, found, telling, each):
                    yield told
        await over
    finally:
        over.cancel()
        # Awaited, so that nothing reads the store once the response has ended.
        await finish_despite_cancel(_ended(over))


async def _ended(task: asyncio.Future[None]) -> None:
    await asyncio.wait({task})


async def _heard(sessions: Sessions, found: Found, telling: Telling, news: News) -> list[Told]:
    """Return the events that news adds to a response. The run of one that waited is found once anything happens."""
    told: list[Told] = []
    if telling.run is None:
        told += telling.begun(await find(sessions, str(found.id)))
    if isinstance(news, Piece):
        told += telling.hear(news)
    else:
        told += telling.take(news)
    return told
