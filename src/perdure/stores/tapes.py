"""The tapes at hand: the parts of logs that are known while a session is loaded, and after it was saved."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Piece, Span, Tape, Transcript, every_span
from perdure.stores.format.placement import transcripts_of
from perdure.stores.format.rows import Stretch


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches in order. Those that touch are joined, and empty ones are left out."""
    found: list[list[Any]] = []
    for log, start, stop in sorted(stretches, key=lambda stretch: (str(stretch[0]), stretch[1])):
        if found and found[-1][0] == log and start <= found[-1][2]:
            found[-1][2] = max(found[-1][2], stop)
        else:
            found.append([log, start, stop])
    return [(log, start, stop) for log, start, stop in found if start < stop]


def without(stretches: Iterable[Stretch], others: Iterable[Stretch]) -> Iterator[Stretch]:
    """Yield the parts of stretches that are not in the others."""
    spans: dict[int | str, list[tuple[int, int]]] = {}
    for log, low, high in merged(others):
        spans.setdefault(log, []).append((low, high))
    for log, begin, stop in merged(stretches):
        start, known = begin, spans.get(log, [])
        first = max(0, bisect_right(known, (start, stop)) - 1)
        for low, high in known[first:]:
            if low >= stop:
                break
            if start < low:
                yield log, start, low
            start = max(start, high)
        if start < stop:
            yield log, start, stop


class TapeCache:
    """The tapes at hand for one load: those of a session that is known already, and what is read in addition."""

    def __init__(self, origin: str, known: AgentSession | None = None) -> None:
        self._origin = origin
        self._tapes: dict[int | str, list[Tape]] = {}
        self._unread: dict[int | str, Tape] = {}
        if known is not None:
            for transcript in transcripts_of(known.state):
                for span in every_span(transcript.pieces):
                    self._keep(span.tape)

    def _keep(self, tape: Tape) -> None:
        if tape.ref is not None and tape.ref.origin == self._origin and tape.items is not None:
            tapes = self._tapes.setdefault(tape.ref.key, [])
            if not any(tape is other for other in tapes):
                tapes.append(tape)

    def missing(self, wanted: Iterable[Stretch]) -> list[Stretch]:
        """Return the stretches that have to be read, merged and in order."""
        gaps = [(log, self._known_up_to(log, start), stop) for log, start, stop in merged(wanted)]
        return [gap for gap in gaps if gap[1] < gap[2]]

    def _known_up_to(self, log: int | str, start: int) -> int:
        return max((t.end for t in self._tapes.get(log, ()) if t.base <= start <= t.end), default=start)

    def put(self, log: int | str, start: int, messages: list[Message]) -> None:
        """Put messages that were read from a log onto the tape that ends there, or onto a new one."""
        touching = [tape for tape in self._tapes.get(log, ()) if tape.base <= start <= tape.end]
        # Of several, take the one that begins first. It has all known messages of the stretch that was wanted.
        tape = min(touching, key=attrgetter("base"), default=None)
        if tape is None or tape.items is None:
            self._keep(Tape(messages, LogRef(self._origin, log), start))
        else:
            grow(tape, start, messages)

    def parted(self, span: Span) -> Sequence[Span]:
        """Return a span that was not read, in two parts if there is a tape with its end."""
        assert span.tape.ref is not None
        for tape in self._tapes.get(span.tape.ref.key, ()):
            if span.start < tape.base < span.stop <= tape.end:
                return Span(span.tape, span.start, tape.base), Span(tape, tape.base, span.stop)
        return (span,)

    def span(self, log: int | str, start: int, stop: int) -> Span:
        for tape in self._tapes.get(log, ()):
            if tape.base <= start and stop <= tape.end:
                return Span(tape, start, stop)
        unread = self._unread.get(log)
        if unread is None:
            unread = self._unread[log] = Tape(None, LogRef(self._origin, log))
        return Span(unread, start, stop)


def with_end_read(view: Transcript, tapes: TapeCache) -> Transcript:
    """Return a view in which spans that were not read are parted in two if their end was read."""
    pieces: list[Piece] = []
    for piece in view.pieces:
        pieces += tapes.parted(piece) if isinstance(piece, Span) and piece.tape.items is None else (piece,)
    return Transcript(pieces)


# One for all tapes: it is held only for a moment.
_growing = threading.Lock()


def grow(tape: Tape, start: int, messages: Sequence[Message]) -> None:
    """Add messages of its log to a tape, as far as it does not have them yet. They begin at position `start`.

    Sessions share tapes, and event loops in several threads share sessions. So two may read the same messages.
    """
    with _growing:
        if tape.items is not None and start <= tape.end:
            tape.items.extend(messages[tape.end - start :])


def consolidate(session: AgentSession) -> AgentSession:
    """Return the same session on fewer tapes: messages that a save has put behind a tape's end move onto it.

    Call it only once the save is durable. A tape must never have a message that its log does not have.
    """
    pieces: list[Piece] = []
    for piece in session.state.transcript.pieces:
        last = pieces[-1] if pieces else None
        if isinstance(last, Span) and isinstance(piece, Span) and _follows(last, piece):
            grow(last.tape, piece.start, piece.messages())
            pieces[-1] = Span(last.tape, last.start, piece.stop)
        else:
            pieces.append(piece)
    if len(pieces) == len(session.state.transcript.pieces):
        return session
    context = replace(session.state.context, transcript=Transcript(pieces))
    return replace(session, state=replace(session.state, context=context))


def _follows(last: Span, span: Span) -> bool:
    return (
        last.tape is not span.tape
        and last.tape.ref is not None
        and last.tape.ref == span.tape.ref
        and last.tape.items is not None
        and span.tape.items is not None
        and last.tape.end == last.stop == span.start
    )
