"""A listener to the events of one run, among all events of a bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, MessageUpdate
from perdure.sessions.cursors import Place
from perdure.sessions.reply import Chunk, Reply

T = TypeVar("T")
# A run's events are emitted in the context in which it was begun, which tells its start from those of other runs.
_heard_by: ContextVar[Listener | None] = ContextVar("perdure_listener", default=None)


class Listener:
    """A listener to the text of one run. Others in its session may come before it, or behind it with what was queued.

    With `continues` the run waited for a person, and continues with what was decided. Before that it had `said` this
    many characters.
    """

    def __init__(self, session_id: SessionId, *, continues: bool = False, said: int = 0) -> None:
        self.began = asyncio.Event()
        """Set once the run has claimed its session."""
        self._chunks: list[Chunk] = []
        self._grown = asyncio.Event()
        self._is_over = False
        self._session_id = session_id
        self._continues = continues
        self._said = said
        self.start: Place | None = None
        """The place where the text of the run begins, once it has begun."""
        self.waits = False
        """True if another run has to answer: one that was under way, or that of a queued message."""

    def listen_to(self, run: Coroutine[Any, Any, Reply[Any]]) -> asyncio.Task[Reply[Any]]:
        """Begin a run in a context where this listener is known, and listen to it."""
        token = _heard_by.set(self)
        work = asyncio.ensure_future(run)
        _heard_by.reset(token)
        work.add_done_callback(lambda _: self._end())
        return work

    async def heard(self) -> AsyncIterator[Chunk]:
        """Yield what the run has said, from its beginning, and what it says until it is over."""
        number = 0
        while True:
            grown = self._grown
            while number < len(self._chunks):
                number += 1
                yield self._chunks[number - 1]
            if self._is_over:
                return
            await grown.wait()

    def hear(self, event: object) -> None:
        if self.waits:  # what another run says is read from its record
            return
        if isinstance(event, MessageUpdate):
            if self.start is not None and event.loop_id == self.start.run and event.kind in ("text", "restart"):
                place = (self._chunks[-1].place if self._chunks else None) or self.start
                self.tell(_chunk(place, event.message_id, event.text if event.kind == "text" else None))
        elif isinstance(event, AgentStart) and self.start is None and self._is_its_own(event):
            self.start = Place(event.loop_id, base=self._said)
            self.began.set()

    def wait_for_another(self) -> None:
        """Note that the answer is another run's."""
        self.waits = True
        self.began.set()

    def tell(self, chunk: Chunk) -> None:
        """Pass on a piece of the answer."""
        self._chunks.append(chunk)
        self._wake()

    def _is_its_own(self, event: AgentStart) -> bool:
        # A killed run is recovered before this message is sent. Its start says that it was resumed: it is another run.
        is_decided = bool(event.approved or event.denied or event.answered)
        is_wanted = is_decided if self._continues else not event.resumed
        return event.session_id == self._session_id and is_wanted and _heard_by.get() is self

    def _end(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        """Wake all that wait. A listener that comes later waits for the next time."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()


def _chunk(place: Place, message_id: str, text: str | None) -> Chunk:
    """Return the chunk that comes after a place."""
    if message_id != place.message_id:
        place = place.in_message(message_id)
    if text is None:
        place = place.at_beginning(place.attempt + 1) if place.offset else place
        return Chunk(restarts=True, offset=place.end, place=place)
    return Chunk(text, offset=place.end, place=place.after(text))
