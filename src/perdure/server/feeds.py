"""News of sessions, for streams: each session is watched once, however many listen to it.

The record is the truth. A listener reads what it has missed from there, then hears what comes. Pieces of an answer that
is not whole yet come too, without a place on the record: the whole message follows them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from typing import Any

import msgspec

from perdure.errors import ConfigurationError
from perdure.model.ids import SessionId
from perdure.model.loop_events import AnyLoopEvent
from perdure.protocols import FORGOTTEN, Ear, Journal, RunProgress, Sketch, said_in
from perdure.runtime.record_reader import PAGE, Story
from perdure.sessions.following import progress_of
from perdure.sessions.sessions import Sessions

_MOST_UNREAD = 1_000
"""The most items that may wait for a listener. One that is further behind gets Lagging."""
_SOONEST, _LATEST = 0.05, 1.0
"""Seconds between two looks at a record that does not notify: after a change, and when nothing happens."""
_SLOWER = 1.3
_LISTENED = 10.0
_LEFT_OPEN = 5.0
"""Seconds that a session is still watched after its last listener has left, since browsers reconnect."""


class Piece(msgspec.Struct, frozen=True):
    """A part of an answer that is being written."""

    run: str
    message: str
    attempt: int
    start: int
    """The number of characters of the answer before it. A piece that starts at 0 replaces what was shown."""
    text: str


class Lagging(Exception):
    """A listener is slower than what happens."""


News = AnyLoopEvent | Piece


class Feeds:
    """The sessions that have listeners."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._feeds: dict[SessionId, _Feed] = {}
        self._tap = sessions._connection.events.wiretap(self._heard)

    def _heard(self, event: object) -> None:
        """Wake a session's feed at once when something happens to the session in this process."""
        feed = self._feeds.get(getattr(event, "session_id", None))  # type: ignore[arg-type]
        if feed is not None:
            feed.wake()

    async def news(self, session_id: SessionId, after: int) -> AsyncGenerator[News, None]:
        """Yield what a session's record has after a place, then what comes. Raise Lagging if it is read too slowly."""
        async with self._listening(session_id) as listener:
            head = listener.head
            async for event in self._sessions.runtime.events(session_id, after=after):
                if (event.cursor or 0) > head:  # the listener hears these
                    break
                yield event
            async for each in listener.items():
                yield each

    async def until(self, session_id: SessionId, after: int, answer: asyncio.Future[Any]) -> AsyncGenerator[News, None]:
        """Yield what happens after a place until an answer is there. Then yield what is on record by that time."""
        while not answer.done():
            try:
                async with aclosing(self.news(session_id, after)) as news, aclosing(_before(answer, news)) as heard:
                    async for each in heard:
                        after = getattr(each, "cursor", None) or after
                        yield each
            except Lagging:  # what was missed is on record
                continue
        async for event in self._sessions.runtime.events(session_id, after=after):
            yield event

    async def end_of(self, session_id: SessionId) -> int:
        """Return the place of the last event on a session's record."""
        return (await progress_of(self._journal(), session_id)).seq

    @asynccontextmanager
    async def _listening(self, session_id: SessionId) -> AsyncIterator[_Listener]:
        feed = self._feeds.get(session_id)
        if feed is None or feed.is_over:  # a feed that has failed does not know what it has missed
            feed = self._feeds[session_id] = _Feed(self._journal(), session_id)
        await feed.begin()
        # Only now: a listener needs the place on the record at which the feed has begun.
        listener = feed.listener()
        try:
            yield listener
        finally:
            feed.listeners.discard(listener)
            if not feed.listeners:
                asyncio.get_running_loop().call_later(_LEFT_OPEN, self._close, feed)

    def _close(self, feed: _Feed) -> None:
        # Another feed may have taken its place after a failure.
        if not feed.listeners and self._feeds.get(feed.session_id) is feed:
            del self._feeds[feed.session_id]
            feed.end()

    async def close(self) -> None:
        """Stop watching."""
        self._tap.cancel()
        for feed in list(self._feeds.values()):
            feed.end()
        self._feeds.clear()

    def _journal(self) -> Journal:
        journal = self._sessions.runtime.journal
        if journal is None:
            raise ConfigurationError("This store has no journal, so there are no events to follow.")
        return journal


async def _before(answer: asyncio.Future[Any], news: AsyncGenerator[News, None]) -> AsyncGenerator[News, None]:
    """Yield news until an answer is there."""
    while True:
        following = asyncio.ensure_future(anext(news, None))
        try:
            await asyncio.wait({following, answer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not following.done():
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
        each = None if following.cancelled() else following.result()
        if each is None:
            return
        yield each


class _Listener:
    def __init__(self, feed: _Feed) -> None:
        self.head = feed.head
        self._waiting: asyncio.Queue[News | BaseException | None] = asyncio.Queue()
        if feed.under_way is not None:
            self._waiting.put_nowait(feed.under_way)

    def tell(self, news: News | BaseException | None) -> None:
        if self._waiting.qsize() < _MOST_UNREAD:
            self._waiting.put_nowait(news)
        elif self._waiting.qsize() == _MOST_UNREAD:
            # The one place above the limit is for this.
            self._waiting.put_nowait(Lagging())

    async def items(self) -> AsyncIterator[News]:
        while (news := await self._waiting.get()) is not None:
            if isinstance(news, BaseException):
                raise news
            yield news


class _Feed:
    """One session that is watched."""

    def __init__(self, journal: Journal, session_id: SessionId) -> None:
        self._journal = journal
        self.session_id = session_id
        self.head = 0
        """The place on the record up to which listeners were told."""
        self.under_way: Piece | None = None
        """The answer that is being written, as far as it is known."""
        self.listeners: set[_Listener] = set()
        self._story = Story(journal, session_id)
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._reason: BaseException | None = None
        self.is_over = False
        """True once it has ended, normally or by a failure. It tells nothing more."""

    async def begin(self) -> None:
        """Begin at the record's end, unless it has begun."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"feed of {self.session_id}")
            self._task.add_done_callback(self._ended)
        await self._begun.wait()

    def listener(self) -> _Listener:
        """Return one more listener. One that comes too late is told the reason at once."""
        listener = _Listener(self)
        self.listeners.add(listener)
        if self.is_over:
            listener.tell(self._reason)
        return listener

    def wake(self) -> None:
        self._changed.set()

    def end(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Tell listeners why it has ended, such as that the session was erased."""
        self.is_over = True
        # Kept for listeners that come later.
        self._reason = None if task.cancelled() else task.exception()
        self._begun.set()  # after a failure too, or `begin` would wait for ever
        for listener in self.listeners:
            listener.tell(self._reason)

    async def _run(self) -> None:
        async with AsyncExitStack() as stack:
            # Listen before looking: otherwise what is written in between would be heard late.
            ear = self._journal.listening(self.session_id) if isinstance(self._journal, Ear) else None
            heard = None if ear is None else await stack.enter_async_context(ear)
            progress = await progress_of(self._journal, self.session_id)
            self.head = progress.seq
            self._hear_pieces(progress)
            self._begun.set()
            await self._watch(heard)

    async def _watch(self, heard: object) -> None:
        pause = _SOONEST
        while True:
            if heard is not None:
                # The limit is for a notification that is lost: the record is read all the same.
                await heard(_LISTENED)  # type: ignore[operator]
            else:
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._changed.wait()
                if self._changed.is_set():
                    self._changed.clear()
                    pause = _SOONEST
            pause = _SOONEST if await self._look() else min(_LATEST, pause * _SLOWER)

    async def _look(self) -> bool:
        """Tell listeners what is new. Return False if nothing was."""
        before = (self.head, self.under_way)
        kept = 0 if self.under_way is None else len(self.under_way.text)
        progress = await progress_of(self._journal, self.session_id, kept)
        while self.head < progress.seq:
            page = await self._journal.read(self.session_id, after=self.head, limit=PAGE)
            for event in await self._story.events([entry for entry in page if entry.kind != FORGOTTEN]):
                self._tell(event)
            self.head = page[-1].seq if page else progress.seq
            # An entry may be the whole message, so the pieces before it are void.
            self.under_way = None
        self._hear_pieces(progress)
        return (self.head, self.under_way) != before

    def _hear_pieces(self, progress: RunProgress) -> None:
        pieces = progress.sketches
        if not pieces or progress.seq != self.head:  # what was read since may hold the whole message
            return
        so_far = _grown(self.under_way, pieces)
        if so_far is None or so_far == self.under_way:
            return
        start = len(self.under_way.text) if _is_same(self.under_way, pieces[0]) and self.under_way is not None else 0
        self.under_way = so_far
        self._tell(msgspec.structs.replace(so_far, start=start, text=so_far.text[start:]))

    def _tell(self, news: News) -> None:
        for listener in self.listeners:
            listener.tell(news)


def _is_same(known: Piece | None, piece: Sketch) -> bool:
    return known is not None and (known.message, known.attempt) == (piece.message_id, piece.attempt)


def _grown(known: Piece | None, pieces: Sequence[Sketch]) -> Piece | None:
    """Return an answer as far as it is known: what was known before, and the pieces after that."""
    first = pieces[0]
    if known is None or not _is_same(known, first):
        text = said_in(pieces)
        return Piece(first.run, first.message_id, first.attempt, 0, text) if text else None
    text = known.text
    for piece in pieces[1:] if len(pieces) > 1 else pieces:
        if piece.start == len(text):
            text += piece.text
    return msgspec.structs.replace(known, text=text)
