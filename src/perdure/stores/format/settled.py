"""Facts about a view that is settled in a store. They are found once and kept with the view, which forks share."""

from __future__ import annotations

from perdure.model.transcript import Span, Transcript
from perdure.stores.format.rows import Stretch

_NONE: frozenset[Stretch] = frozenset()


class Settled:
    """The stretches of logs that a view without blocks is made of."""

    __slots__ = ("is_at_hand", "logs", "origin", "parts", "stretches")

    def __init__(self, origin: str, stretches: frozenset[Stretch], is_at_hand: bool) -> None:
        self.origin = origin
        self.stretches = stretches
        self.logs = frozenset([log for log, _, _ in stretches])
        self.is_at_hand = is_at_hand
        self.parts: tuple[tuple[str, bytes], ...] | None = None
        """The parts of a head that have the view, once it was written."""

    def others(self, log: int | str) -> frozenset[Stretch]:
        """Return the stretches of all logs except one."""
        if log not in self.logs:
            return self.stretches
        if len(self.logs) == 1:
            return _NONE
        return frozenset(stretch for stretch in self.stretches if stretch[0] != log)


def settled_in(view: Transcript, origin: str) -> Settled | None:
    """Return the facts about a view; None unless it is settled in this store."""
    found = view.found
    return found if isinstance(found, Settled) and found.origin == origin else None


def note_settled(view: Transcript, origin: str) -> None:
    """Find and keep the facts about a view, all of which is in this store's logs."""
    if settled_in(view, origin) is not None:
        return
    stretches: set[Stretch] = set()
    is_at_hand = True
    for piece in view.pieces:
        if not isinstance(piece, Span):
            return  # a block keeps its own stored form
        tape = piece.tape
        assert tape.ref is not None
        assert tape.ref.origin == origin
        stretches.add((tape.ref.key, piece.start, piece.stop))
        is_at_hand = is_at_hand and tape.items is not None
    view.found = Settled(origin, frozenset(stretches), is_at_hand)
