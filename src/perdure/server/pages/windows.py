"""Parts of long conversations. Only what a page shows is read, however much was said."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import Piece, Span, Tape, every_span
from perdure.protocols import FORGOTTEN, Chronicle
from perdure.sessions.pages import end_of_session
from perdure.sessions.sessions import Sessions

WINDOW = 60
"""The number of messages on a page."""
END = 2 * WINDOW
"""The number of messages that are read with a session."""


async def said_spans(sessions: Sessions, session: AgentSession) -> list[Span] | None:
    """Return the spans of all that was said, if that is simple: what the session began with, then its own log.

    Return None if something was selected, adopted or forgotten. Then `history` has to put it together.
    """
    journal = sessions.runtime.journal
    if not isinstance(journal, Chronicle) or session.state.adopted is not None or session.info.first_version > 1:
        return None
    own, end = await journal.log_of(session.id)
    first = await end_of_session(sessions, session.id, 1, last=0)
    began = [span for span in every_span(first.state.transcript.pieces) if span.tape.ref != own]
    if _overlap(began) or any(run.log != own and run.start < run.stop for run in await journal.branches(session.id)):
        return None
    known = [*began, Span(Tape(None, own), 0, end)]
    view = every_span(session.state.transcript.pieces)
    return known if all(any(_holds(each, span) for each in known) for span in view) else None


def _overlap(spans: Sequence[Span]) -> bool:
    """Tell whether two spans name the same message: a block may show what it covers."""
    ordered = sorted(spans, key=lambda span: (str(span.tape.ref), span.start))
    return any(before.tape.ref == after.tape.ref and after.start < before.stop for before, after in pairwise(ordered))


def _holds(outer: Span, inner: Span) -> bool:
    return outer.tape.ref == inner.tape.ref and outer.start <= inner.start and inner.stop <= outer.stop


def cut(pieces: Sequence[Span], start: int, stop: int) -> list[Span]:
    """Return the parts of spans between two places, which are counted over all of them."""
    kept = []
    for span in pieces:
        low, high = max(start, 0), min(stop, len(span))
        if low < high:
            kept.append(span.cut(low, high))
        start, stop = start - len(span), stop - len(span)
    return kept


def place_in_log(spans: Sequence[Span], position: int) -> int:
    """Return the place of a message of the session's own log among all that was said."""
    return sum(map(len, spans[:-1])) + position


def length_of(pieces: Iterable[Piece]) -> int:
    """Return how many messages pieces show."""
    return sum(map(len, pieces))


def is_there(message: Message) -> bool:
    """Tell whether a message was not forgotten."""
    return message.id != FORGOTTEN
