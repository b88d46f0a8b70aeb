"""Parts of long conversations: only what a page shows is read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import msgspec

from perdure.errors import NotLoaded, SessionNotFound
from perdure.model.ids import SessionId
from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Span
from perdure.protocols import Journal
from perdure.sessions.history import some_said
from perdure.sessions.looking import Looking


class MessagePage(msgspec.Struct, frozen=True):
    """Some messages of a conversation, in order."""

    messages: Sequence[Message]
    total: int
    """The number of places that the whole has."""


async def glimpse(sessions: Looking, session_id: str, version: int | None = None) -> AgentSession:
    """Return a session of which only the last message is read, if its store can do that.

    Looking at another message may raise NotLoaded. All else is there, and messages can be counted.
    """
    return await end_of_session(sessions, await sessions._reach(session_id), version, last=1)


async def end_of_session(
    sessions: Looking, session_id: SessionId, version: int | None = None, *, last: int
) -> AgentSession:
    """Return a session within reach. Only its end is read, if its store can do that. Otherwise it is loaded whole."""
    store: Any = sessions.store
    if sessions._connection.controller is not None or not hasattr(store, "glance"):  # a controller may look at all
        return await sessions.session(session_id, version)
    found: AgentSession | None = await store.load(session_id, version, last=last)
    if found is None:
        raise SessionNotFound(session_id, version)
    return found


class SpanReader:
    """A reader of messages where they are: in memory, or in a log of the store."""

    def __init__(self, journal: Journal | None) -> None:
        self._journal = journal

    async def messages(self, spans: Iterable[Span]) -> list[Message]:
        """Return the messages of spans, in order."""
        return [message for span in spans for message in await self._of(span)]

    async def _of(self, span: Span) -> Sequence[Message]:
        tape = span.tape
        if tape.items is not None and tape.base <= span.start and span.stop <= tape.end:
            return span.messages()
        if tape.ref is None or self._journal is None:
            raise NotLoaded("a message that no store has")
        return await self._journal.messages(tape.ref, span.start, span.stop)


async def page_of_shown(
    sessions: Looking, session_id: str, start: int, stop: int, version: int | None = None
) -> MessagePage:
    """Return the messages from one place to another of what the model is shown, now or as of a version."""
    view = (await glimpse(sessions, session_id, version)).state.transcript
    spans = view.cut(start, stop).spans()
    return MessagePage(await SpanReader(sessions.runtime.journal).messages(spans), len(view))


async def page_of_said(sessions: Looking, session_id: str, start: int, stop: int) -> MessagePage:
    """Return what was said from one place to another: a part of `history`.

    What a compaction has put in place of messages may have a place, too, but is left out.
    """
    session = await glimpse(sessions, session_id)
    at_version = partial(glimpse, sessions, session_id)
    return MessagePage(*await some_said(sessions.runtime.journal, session, at_version, start, stop))
