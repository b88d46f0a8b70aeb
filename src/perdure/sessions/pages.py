"""Parts of long conversations: what a page shows is read, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from perdure.errors import SessionNotFound
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
    """How many places the whole has."""


async def glimpse(sessions: Looking, session_id: str, version: int | None = None) -> AgentSession:
    """Return a session of which only the last message is read, if its store can do that.

    To look at another message may raise NotLoaded. All else is there, and messages can be counted.
    """
    store: Any = sessions.store
    if sessions._connection.controller is not None or not hasattr(store, "glance"):  # a controller may look at all
        return await sessions.session(session_id, version)
    key = await sessions._reach(session_id)
    found: AgentSession | None = await store.load(key, version, last=1)
    if found is None:
        raise SessionNotFound(key, version)
    return found


async def page_of_shown(
    sessions: Looking, session_id: str, start: int, stop: int, version: int | None = None
) -> MessagePage:
    """Return the messages from one place to another of what the model is shown, now or as of a version."""
    view = (await glimpse(sessions, session_id, version)).state.transcript
    spans = view.cut(start, stop).spans()
    messages = [message for span in spans for message in await _read(sessions.runtime.journal, span)]
    return MessagePage(messages, len(view))


async def page_of_said(sessions: Looking, session_id: str, start: int, stop: int) -> MessagePage:
    """Return what was said from one place to another: a part of `history`.

    What a compaction has put in place of messages may have a place too, and is left out.
    """
    session = await glimpse(sessions, session_id)
    at_version = partial(glimpse, sessions, session_id)
    return MessagePage(*await some_said(sessions.runtime.journal, session, at_version, start, stop))


async def _read(journal: Journal | None, span: Span) -> Sequence[Message]:
    if span.tape.items is not None or span.tape.ref is None or journal is None:
        return span.messages()
    return await journal.messages(span.tape.ref, span.start, span.stop)
