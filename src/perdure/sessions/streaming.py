"""Hears what one run says, of all that is said on a bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any

from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, MessageUpdate
from perdure.sessions.cursors import Place
from perdure.sessions.reply import Chunk, Reply

_heard_by: ContextVar[Listener | None] = ContextVar("perdure_listener", default=None)


class Listener:
    """Hears the text of one run alone: others in its session may come before it, or behind it with what was queued.

    With `continues` it is a run that waited for a person, and goes on with what was decided; it had `said` so many
    characters before.
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
        self.place: Place | None = None
        """How far the run has come in what it says."""

    def listen_to(self, run: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
        """Begin a run, which tells of itself in a context where this listener is known."""
        token = _heard_by.set(self)
        work = asyncio.ensure_future(run)
        _heard_by.reset(token)
        work.add_done_callback(lambda _: self._end())
        return work

    async def heard(self) -> AsyncIterator[Chunk]:
        """Yield what the run has said, from its beginning, and what it says until it is over."""
        place = 0
        while True:
            grown = self._grown
            while place < len(self._chunks):
                yield self._chunks[place]
                place += 1
            if self._is_over:
                return
            await grown.wait()

    def hear(self, event: object) -> None:
        if isinstance(event, MessageUpdate):
            if self.place is not None and event.loop_id == self.place.run and event.kind in ("text", "restart"):
                self._chunks.append(self._chunk(event, self.place))
                self._wake()
        elif isinstance(event, AgentStart) and self.place is None and self._is_its_own(event):
            self.place = Place(event.loop_id, base=self._said)
            self.began.set()

    def _chunk(self, event: MessageUpdate, place: Place) -> Chunk:
        if event.message_id != place.message_id:
            place = place.in_message(event.message_id)
        if event.kind == "restart":
            self.place = place = place.at_beginning(place.attempt + 1) if place.offset else place
            return Chunk(restarts=True, offset=place.end, place=place)
        self.place = place.after(event.text)
        return Chunk(event.text, offset=place.end, place=self.place)

    def _is_its_own(self, event: AgentStart) -> bool:
        # A run that was killed is recovered before what was said now is sent: it is resumed, and another's.
        is_wanted = bool(event.approved or event.denied) if self._continues else not event.resumed
        return event.session_id == self._session_id and is_wanted and _heard_by.get() is self

    def _end(self) -> None:
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        """Wake those who wait; who comes later waits for the next time."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()
