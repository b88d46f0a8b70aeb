"""Events of a session, sent to its page as rendered rows. An id is a place on the record, as in the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from sse_starlette import ServerSentEvent
from starlette.responses import Response

from perdure.errors import PerdureError, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentEnd, AgentStart, Compaction, MessageEnd, TurnEnd
from perdure.server.call import Call
from perdure.server.feeds import Lagging, News, Piece
from perdure.server.pages.conversation import boxes_of
from perdure.server.pages.event_rows import row_of
from perdure.server.pages.render import filled
from perdure.server.sse import RETRY, Events, place_of, streamed

_LOOK_AGAIN = 2.0
"""Seconds after which a page is told of changes that are not on the record, such as a new name."""
_MAY_CHANGE = (AgentStart, AgentEnd, TurnEnd, Compaction)


class LiveQuery(msgspec.Struct, kw_only=True):
    """The state of a page: the place on the record, and what it shows."""

    after: int = 0
    version: int = 0
    """The newest version that the page knows."""
    running: bool = False
    """True if the page shows that the session is being run."""
    follow: bool = True
    """True if the page shows the newest messages, so that new ones belong to it."""


async def follow_session(call: Call) -> Response:
    """Return the rows of what happens, and pieces of the answer that is being written."""
    asked: LiveQuery = call.query
    info = await call.sessions.info(call.session_id)
    call.service.require_room(call.caller)
    end = await call.service.feeds.end_of(info.id)
    after = min(place_of(call, asked.after), end)  # past the end, the store was restored
    return streamed(call, _events(call, info.id, after, asked))


async def _events(call: Call, session_id: SessionId, after: int, asked: LiveQuery) -> Events:
    yield ServerSentEvent(comment="perdure", retry=RETRY, sep="\n")
    known = _Known(call, session_id, asked)
    try:
        async for news in _with_pauses(call.service.feeds.news(session_id, after)):
            if news is not None:
                yield _rendered(news, follow=asked.follow)
            if (news is None or isinstance(news, _MAY_CHANGE)) and await known.has_changed():
                yield ServerSentEvent("changed", event="changed", sep="\n")
    except (Lagging, PerdureError):  # the page connects again, and is told then
        return


async def _with_pauses(feed: AsyncIterator[News]) -> AsyncIterator[News | None]:
    """Yield what comes, and None whenever nothing has come for a while."""
    following: asyncio.Future[News | None] = asyncio.ensure_future(anext(feed, None))
    try:
        while True:
            done, _ = await asyncio.wait({following}, timeout=_LOOK_AGAIN)
            if not done:
                yield None
                continue
            news = following.result()
            if news is None:
                return
            yield news
            following = asyncio.ensure_future(anext(feed, None))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await feed.aclose()  # type: ignore[attr-defined]  # it is a generator


class _Known:
    """The part of a session's state that a page shows."""

    def __init__(self, call: Call, session_id: SessionId, asked: LiveQuery) -> None:
        self._call = call
        self._session_id = session_id
        self._state = (asked.version, asked.running)
        self._waits: int | None = None

    async def has_changed(self) -> bool:
        """Tell whether a page has to be drawn again: another version, a run that begins, or messages that wait."""
        sessions = self._call.service.sessions_of(self._call.caller)
        try:
            version = (await sessions.info(self._session_id)).version
        except SessionNotFound:  # it was erased, and the feed ends by itself
            return False
        journal = sessions.runtime.journal
        assert journal is not None  # or there would be no feed
        waits = len(await journal.read(self._session_id, inbox=True))
        state = (version, await journal.is_claimed(self._session_id))
        is_other = state != self._state or self._waits not in (None, waits)
        self._state, self._waits = state, waits
        return is_other


def _rendered(news: News, *, follow: bool) -> ServerSentEvent:
    """Return news as rows for the places of the page that they belong to."""
    if isinstance(news, Piece):
        html = filled("live_piece.html", piece=news) if follow else ""
        return ServerSentEvent(html, sep="\n")
    boxes = boxes_of([news.message]) if follow and isinstance(news, MessageEnd) else ()
    html = filled("live_event.html", event=row_of(news), boxes=boxes, is_whole=isinstance(news, MessageEnd | AgentEnd))
    return ServerSentEvent(html, id=str(news.cursor), sep="\n")
