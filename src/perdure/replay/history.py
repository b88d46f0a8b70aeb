"""The history of a turn in which new answers stand in for those on record."""

from __future__ import annotations

from collections.abc import Sequence

from perdure.model.loop_events import AnyLoopEvent, InputRejected, MessageEnd
from perdure.model.message import Message
from perdure.model.transcript import Transcript
from perdure.replay.story import PlayedTurn


class Retold:
    """A turn on record, and what its replay has said."""

    def __init__(self, turn: PlayedTurn, replayed: Sequence[AnyLoopEvent]) -> None:
        self._loop_id = turn.loop_id
        asked = {message.id for message in turn.asked}
        self._said = {message.id for message in _said(turn.events) if message.id not in asked}
        self.new = [message for message in _said(replayed) if message.id not in asked]

    def places_in(self, view: Sequence[Message]) -> tuple[int, int] | None:
        """Return where a view shows all that the run on record has said; None if it shows a part of it, or none."""
        places = [place for place, message in enumerate(view) if message.id in self._said]
        return (places[0], places[-1] + 1) if places and len(places) == len(self._said) else None


def retold(view: Transcript, turns: Sequence[Retold]) -> tuple[Transcript, list[Message]] | None:
    """Return the beginning of a view that stays, and the messages behind it with the new answers among them.

    None if nothing changes. A run stays as it is if the view shows only a part of it, trimmed or summarised.
    """
    messages = list(view)
    first = len(messages)
    for turn in turns:
        found = turn.places_in(messages)
        if found is not None:
            start, stop = found
            messages[start:stop] = turn.new
            first = min(first, start)
    if first >= len(view):
        return None
    return view.cut(0, first), messages[first:]


def _said(events: Sequence[AnyLoopEvent]) -> list[Message]:
    refused = {name for event in events if isinstance(event, InputRejected) for name in event.message_ids}
    said = [event.message for event in events if isinstance(event, MessageEnd)]
    return [message for message in said if message.id not in refused and not message.is_superseded]
