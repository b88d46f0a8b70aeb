"""A window of a conversation: of what the model is shown, or of all that was said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perdure.model.execution import PendingCall
from perdure.model.session import AgentSession
from perdure.server.pages.conversation import Conversation, plain_entries, view_entries
from perdure.server.pages.windows import WINDOW, cut, length_of, place_in_log, said_spans
from perdure.sessions.pages import SpanReader
from perdure.sessions.sessions import Sessions


async def shown_window(
    sessions: Sessions, session: AgentSession, end: int | None, pending: Iterable[PendingCall]
) -> Conversation:
    """Return what the model is shown up to a place, or up to the end."""
    transcript = session.state.transcript
    start, stop = _window(len(transcript), end)
    reader = SpanReader(sessions.runtime.journal)
    entries, messages = await view_entries(reader, transcript.pieces, start, stop, pending, top=True)
    return Conversation(entries, start, stop, len(transcript), messages)


async def said_window(
    sessions: Sessions,
    session: AgentSession,
    end: int | None,
    message: str | None,
    place: int | None,
    pending: Sequence[PendingCall] = (),
) -> Conversation:
    """Return what was said up to a place, or around a message that a search has found at a place of the log."""
    spans = await said_spans(sessions, session)
    if spans is not None:
        around = None if place is None else place_in_log(spans, place)
        start, stop = _window(length_of(spans), end, around)
        messages = await SpanReader(sessions.runtime.journal).messages(cut(spans, start, stop))
        found = Conversation(plain_entries(messages, pending), start, stop, length_of(spans), messages)
        if message is None or any(each.id == message for each in found.messages):
            return found
    said = await sessions.history(session.id)  # last, since it reads everything
    around = next((at for at, each in enumerate(said) if each.id == message), None)
    start, stop = _window(len(said), end, around)
    return Conversation(plain_entries(said[start:stop], pending), start, stop, len(said), list(said[start:stop]))


def _window(total: int, end: int | None, around: int | None = None) -> tuple[int, int]:
    """Return where a window begins and ends: around a message, up to a place, or at the very end."""
    wanted = total if end is None else end
    stop = max(0, min(total, wanted if around is None else around + WINDOW // 2))
    return max(0, stop - WINDOW), stop
