"""What is found out once about a view that is settled in a store, and kept with it: forks share a view."""

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
        """The view as it stands in a head, once it was written."""

    def others(self, log: int | str) -> frozenset[Stretch]:
        """Return the stretches of all logs but one."""
        if log not in self.logs:
            return self.stretches
        if len(self.logs) == 1:
            return _NONE
        return frozenset(stretch for stretch in self.stretches if stretch[0] != log)


def settled_in(view: Transcript, origin: str) -> Settled | None:
    """Return what was found out about a view, if it is settled in this store."""
    found = view.found
    return found if isinstance(found, Settled) and found.origin == origin else None


def note_settled(view: Transcript, origin: str) -> None:
    """Find out about a view, all of which is in this store's logs. Blocks keep what is known of them themselves."""
    if settled_in(view, origin) is not None:
        return
    stretches: set[Stretch] = set()
    is_at_hand = True
    for piece in view.pieces:
        if not isinstance(piece, Span):
            return
        tape = piece.tape
        assert tape.ref is not None
        assert tape.ref.origin == origin
        stretches.add((tape.ref.key, piece.start, piece.stop))
        is_at_hand = is_at_hand and tape.items is not None
    view.found = Settled(origin, frozenset(stretches), is_at_hand)
