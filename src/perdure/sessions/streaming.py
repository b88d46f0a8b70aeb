"""Hears what one run says, of all that is said on a bus."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import Any

from perdure.model.ids import SessionId
from perdure.model.loop_events import AgentStart, MessageUpdate
from perdure.sessions.reply import Chunk, Reply

_heard_by: ContextVar[Listener | None] = ContextVar("perdure_listener", default=None)


class Listener:
    """Hears the text of one run alone: others in its session may come before it, or behind it with what was queued."""

    def __init__(self, session_id: SessionId) -> None:
        self.chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()
        self._session_id = session_id
        self._loop_id: str | None = None

    def listen_to(self, run: Coroutine[Any, Any, Reply[Any]]) -> asyncio.Task[Reply[Any]]:
        """Begin a run, which tells of itself in a context where this listener is known."""
        token = _heard_by.set(self)
        work = asyncio.ensure_future(run)
        _heard_by.reset(token)
        work.add_done_callback(lambda _: self.chunks.put_nowait(None))
        return work

    def hear(self, event: object) -> None:
        if isinstance(event, MessageUpdate):
            if event.loop_id == self._loop_id and event.kind in ("text", "restart"):
                self.chunks.put_nowait(_chunk(event))
        elif isinstance(event, AgentStart) and self._loop_id is None and self._is_its_own(event):
            self._loop_id = event.loop_id

    def _is_its_own(self, event: AgentStart) -> bool:
        # A run that was killed is recovered before what was said now is sent: it is resumed, and another's.
        return event.session_id == self._session_id and not event.resumed and _heard_by.get() is self


def _chunk(event: MessageUpdate) -> Chunk:
    return Chunk(restarts=True) if event.kind == "restart" else Chunk(event.text)
