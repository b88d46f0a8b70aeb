"""The tapes at hand while a session is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

from perdure.model.message import Message
from perdure.model.session import AgentSession
from perdure.model.transcript import LogRef, Span, Tape, every_span
from perdure.stores.format.placement import grow, transcripts_of
from perdure.stores.format.rows import Stretch


def merged(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Return stretches in order, those that touch made one, without those of no messages."""
    found: list[list[Any]] = []
    for log, start, stop in sorted(stretches, key=lambda stretch: (str(stretch[0]), stretch[1])):
        if found and found[-1][0] == log and start <= found[-1][2]:
            found[-1][2] = max(found[-1][2], stop)
        else:
            found.append([log, start, stop])
    return [(log, start, stop) for log, start, stop in found if start < stop]


class TapeCache:
    """The tapes at hand for one load: those of a session known from before, and what is read in addition."""

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
        """What has to be read, merged and in order."""
        gaps = [(log, self._known_up_to(log, start), stop) for log, start, stop in merged(wanted)]
        return [gap for gap in gaps if gap[1] < gap[2]]

    def _known_up_to(self, log: int | str, start: int) -> int:
        return max((t.end for t in self._tapes.get(log, ()) if t.base <= start <= t.end), default=start)

    def put(self, log: int | str, start: int, messages: list[Message]) -> None:
        """Messages that were read from a log: onto the tape that ends there, or a new one."""
        touching = [tape for tape in self._tapes.get(log, ()) if tape.base <= start <= tape.end]
        # Of several the one that begins first: it holds all that is known of the stretch that was wanted.
        tape = min(touching, key=attrgetter("base"), default=None)
        if tape is None or tape.items is None:
            self._keep(Tape(messages, LogRef(self._origin, log), start))
        else:
            grow(tape, start, messages)

    def span(self, log: int | str, start: int, stop: int) -> Span:
        for tape in self._tapes.get(log, ()):
            if tape.base <= start and stop <= tape.end:
                return Span(tape, start, stop)
        unread = self._unread.get(log)
        if unread is None:
            unread = self._unread[log] = Tape(None, LogRef(self._origin, log))
        return Span(unread, start, stop)
