"""Hears what one run says, of all that is said on a bus."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, MessageUpdate
from perdure.sessions.reply import Chunk, Reply

T = TypeVar("T")
_heard_by: ContextVar[Listener | None] = ContextVar("perdure_listener", default=None)


class Listener:
    """Hears the text of one run alone: others in its session may come before it, or behind it with what was queued.

    With `continues` it is a run that waited for a person, and goes on with what was decided.
    """

    def __init__(self, session_id: SessionId, *, continues: bool = False) -> None:
        self.began = asyncio.Event()
        """Set once the run has claimed its session."""
        self._chunks: list[Chunk] = []
        self._grown = asyncio.Event()
        self._is_over = False
        self._session_id = session_id
        self._continues = continues
        self._loop_id: str | None = None

    def listen_to(self, run: Coroutine[Any, Any, Reply[Any]]) -> asyncio.Task[Reply[Any]]:
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
            if event.loop_id == self._loop_id and event.kind in ("text", "restart"):
                self._chunks.append(_chunk(event))
                self._wake()
        elif isinstance(event, AgentStart) and self._loop_id is None and self._is_its_own(event):
            self._loop_id = event.loop_id
            self.began.set()

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


def _chunk(event: MessageUpdate) -> Chunk:
    return Chunk(restarts=True) if event.kind == "restart" else Chunk(event.text)
